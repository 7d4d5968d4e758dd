"""kolovod.launch.standstill, and the launcher that asks it: ranks that are stopped at the end."""

from __future__ import annotations

import os
import re
import signal

import pytest
from launched import DEADLINE_S, launcher, read_pids, run_code, wait_until_gone
from waiting import until

from kolovod.launch import orphan_reaper
from kolovod.launch.standstill import LOOK_S, Standstill


def looks(standstill, times, running, stopped):
    return [(now, due) for now in times if (due := standstill.look(now, running, stopped))]


def seconds(begin, end):
    return [begin + n * LOOK_S for n in range(round((end - begin) / LOOK_S))]


def test_it_is_reported_once_and_then_a_failure():
    standstill = Standstill(2.0, 5.0)
    assert looks(standstill, seconds(100, 105), {1}, {1, 2}) == [(102.0, "report")]
    assert looks(standstill, [105.0], {1}, {1}) == [(105.0, "failure")]
    assert "for 5 s" in standstill.why


def test_a_rank_that_works_or_goes_on_is_left_alone():
    standstill = Standstill(2.0, 5.0)
    assert looks(standstill, seconds(100, 110), {1, 2}, {1}) == []
    assert looks(standstill, seconds(110, 114.5), {1, 2}, {1, 2}) == [(112.0, "report")]
    assert looks(standstill, [114.5], {1, 2}, {1}) == []
    assert looks(standstill, seconds(115, 119.5), {1, 2}, {1, 2}) == [(117.0, "report")]
    assert looks(standstill, [119.5], {1}, {1}) == []  # one has ended: the time begins anew
    assert looks(standstill, seconds(120, 124.5), {1}, {1}) == [(121.5, "report")]


def test_limits_of_zero_are_none():
    assert looks(Standstill(0, 0), seconds(100, 1000), {0}, {0}) == []
    assert looks(Standstill(1, 0), seconds(100, 1000), {0}, {0}) == [(101.0, "report")]
    assert looks(Standstill(0, 1), seconds(100, 101.5), {0}, {0}) == [(101.0, "failure")]


def test_the_time_for_which_the_launcher_was_stopped_itself_does_not_count():
    standstill = Standstill(2.0, 5.0)
    assert looks(standstill, [100.0, 100.5], {0}, {0}) == []
    assert looks(standstill, [400.0, 400.5], {0}, {0}) == []
    assert looks(standstill, seconds(401, 405), {0}, {0}) == [(402.0, "report")]


STOPS_AT_THE_END = "os.kill(os.getpid(), signal.SIGSTOP) if rank == 1 else None"


@pytest.mark.slow
def test_a_rank_that_is_stopped_at_the_end_ends_with_the_limit():
    flags = ["--late-report-s", "0.6", "--late-failure-s", "1.6", "--label-hosts", "a:1,b:1"]
    done = run_code(2, STOPS_AT_THE_END, *flags)
    name = r"rank 1 on host b \(pid \d+\)"
    assert re.search(rf"kolovod: {name} is stopped \(SIGSTOP\), and all other ranks", done.stderr)
    assert re.search(rf"{name} was killed by the launcher: it was stopped .* 1\.6 s", done.stderr)
    assert re.search(rf"the first to fail was {name}: it was killed by the launcher", done.stderr)
    assert done.returncode == 137


def test_without_a_limit_it_is_waited_for():
    code = f"print('pid', os.getpid(), flush=True); {STOPS_AT_THE_END}; print('goes on')"
    with launcher(2, code, "--late-report-s", "0.6") as process:
        pids = read_pids(process, 2)
        assert process.stderr is not None
        assert "is stopped" in process.stderr.readline()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "[1]<stdout>:goes on" in out
    assert err == ""


def test_a_stopped_rank_is_ended_by_the_launchers_signal_at_once():
    code = f"""
def ended(*_): print('took leave', flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, ended)
print('pid', os.getpid(), flush=True)
{STOPS_AT_THE_END}
time.sleep(60)
"""
    with launcher(2, code, "--late-report-s", "0") as process:
        pids = read_pids(process, 2)
        until(lambda: any(orphan_reaper.is_stopped(pid) for pid in pids))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert out.count("took leave") == 2  # nobody had to be killed
    wait_until_gone(pids)

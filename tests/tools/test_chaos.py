"""bench/chaos.py: what it draws, and that it sees what must not be. As root, with namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import report
from chaos import Turn, by_kind, markdown, row
from chaos_faults import FEWEST, KINDS, Drawing, Fault, places
from chaos_hosts import ChaosHosts
from chaos_job import ChaosJob, FalseEndError, NotWholeError
from chaos_means import Means
from elastic_steps import until
from netbed import Bed, unavailable
from partitions import Steps, StepsDiffer
from slow_exec import SlowExec

from kolovod.coordination.hosts import RetryPolicy

HOSTS = ("a", "b", "c")
PLACES = places(HOSTS, 5)
KILLING = ("kill", "loop", "stopped", "slow agent", "shared memory", "tmp")
needs_bed = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def drawn(job: int, turns: int, kinds: dict[str, int] = KINDS) -> list[list[Fault]]:
    drawing = Drawing(1, job, HOSTS, 5, kinds)
    return [drawing.draw() for _ in range(turns)]


def test_a_seed_and_a_job_draw_the_same_again() -> None:
    assert drawn(1, 12) == drawn(1, 12)
    assert drawn(1, 12) != drawn(2, 12)


def test_what_is_drawn_leaves_a_job_that_can_go_on() -> None:
    seen: Counter[str] = Counter()
    pairs = 0
    for number in range(300):
        drawing = Drawing(7, number, HOSTS, 5, KINDS)
        kills: Counter[int] = Counter()
        has_no_folder = False
        for _ in range(12):
            slots = set(drawing.slots)
            turn = drawing.draw()
            seen.update(fault.kind for fault in turn)
            pairs += len(turn) == 2
            named = [fault.slot for fault in turn if fault.slot >= 0]
            assert len(set(named)) == len(named)
            assert slots.issuperset(named)
            kills.update(f.slot for f in turn if f.kind in KILLING)
            for fault in turn:
                if fault.kind == "agent":
                    killed = [s for s in slots if PLACES[s] in fault.hosts]
                    assert 2 * len(killed) < len(slots) == len(PLACES)
                    kills.update(killed)
                if fault.kind in ("tmp", "slow agent"):
                    assert fault.hosts == (PLACES[fault.slot],)
                assert not (has_no_folder and "viewer" in fault.kind)
                has_no_folder |= fault.kind == "job folder"
            if {"agent", "suspended", "job folder"} & {f.kind for f in turn}:
                assert len(turn) == 1
            if "leave" in {fault.kind for fault in turn}:
                assert not {"link", "partition", "shared memory"} & {f.kind for f in turn}
            for fault in turn:
                assert len(fault.hosts) < len(HOSTS)
                assert str(fault).startswith(fault.kind)
        assert max(kills.values(), default=0) <= RetryPolicy().retries
        assert len(drawing.slots) >= FEWEST
    assert seen.keys() == KINDS.keys()
    assert 0.1 < pairs / (300 * 12) < 0.4


def test_where_nothing_may_be_drawn_any_more_that_is_said() -> None:
    drawing = Drawing(1, 1, HOSTS, FEWEST, {"leave": 1})
    with pytest.raises(ValueError, match=r"no fault of the kinds \['leave'\]"):
        drawing.draw()


def test_turns_are_summed_up_by_kind() -> None:
    kill, stop = Fault("kill", slot=1), Fault("stop", lasts_s=0.5, slot=2)
    turns = [Turn(n, [kill], whole_s) for n, whole_s in enumerate([3.0, None, 4.0, 2.0])]
    turns.append(Turn(5, [kill, stop], 1.0, met_forming=True))
    rows = {one["kind"]: row(one)[1:] for one in by_kind(turns)}
    assert rows["kill"] == ["4", "3", "3.00", "4.00", "4.00"]
    assert rows["stop"] == ["0", "0", "-", "-", "-"]
    assert rows["two"] == ["1 x 2", "1", "1.00", "1.00", "1.00"]
    longest = {one["kind"]: one["longest"] for one in by_kind(turns)}
    assert longest["kill"] == "job 2: kill: slot 1: whole after 4.00 s"
    assert longest["stop"] is None


def test_the_real_page_shows_the_real_results() -> None:
    result = json.loads((report.RESULTS / "chaos.json").read_text())
    assert (report.RESULTS / "chaos.md").read_text() == markdown(result)


def test_a_step_that_two_ranks_know_differently_ends_the_job(tmp_path: Path) -> None:
    for slot, value in ((0, 5), (1, 6)):
        lines = [f"{slot} 1 2 {slot} 1 {value}", f"{slot} 2 2 {slot} 1 7"]
        (tmp_path / f"{slot}.1").write_text("\n".join(lines) + "\n")
    with pytest.raises(StepsDiffer, match="step 1 has two values"):
        Steps(tmp_path).look()


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(bed: Bed) -> ChaosHosts:
    return ChaosHosts(bed)


ONE_OF_EACH = [
    Fault("kill", slot=0),
    Fault("stop", slot=1, lasts_s=0.5),
    Fault("link", hosts=("b",), lasts_s=2.0),
    Fault("partition", hosts=("a", "c"), lasts_s=1.6),
    Fault("viewer"),
    Fault("keeper"),
    Fault("viewer and keeper"),
    Fault("shared memory", slot=2, hosts=("c",), lasts_s=0.5),
    Fault("loop", slot=2),
    Fault("stopped", slot=3),
    Fault("agent", hosts=("c",)),
    Fault("agent", hosts=("a",)),  # where the launcher is, which is not the first one any more
    Fault("agent stopped", hosts=("b",), lasts_s=11.0),
    Fault("slow agent", slot=1, hosts=("a",), lasts_s=1.5),
    Fault("tmp", slot=0, hosts=("a",), lasts_s=1.5),
    Fault("keeper stopped", lasts_s=4.0),
    Fault("suspended", lasts_s=5.0),
    Fault("job folder"),
    Fault("leave", slot=4),
]


@needs_bed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_is_whole_after_each_fault_and_exact_at_its_end(bed: Bed, hosts: ChaosHosts) -> None:
    assert {fault.kind for fault in ONE_OF_EACH} == KINDS.keys()
    assert hosts.left() == []
    job = ChaosJob(bed, hosts, bed.folder / "job", 5)
    means = Means(bed, hosts, job)
    try:
        job.until_whole(5)
        before = job.ranks()
        assert sorted(before) == [0, 1, 2, 3, 4]
        for fault in ONE_OF_EACH:
            means.begin(fault)
            time.sleep(fault.lasts_s)
            means.end(fault)
            job.until_whole(4 if fault.kind == "leave" else 5)
        until(lambda: sorted(job.ranks()) == [0, 1, 2, 3])  # who leaves ends after that
        after = job.ranks()
        assert {p.pid for p in before[0]}.isdisjoint(p.pid for p in after[0])
        time.sleep(3.0)
        job.until_whole(4)
        assert job.finish(4, contextlib.nullcontext()) > 30
        assert job.until_clean() == []
    finally:
        job.close()
        hosts.clear()


@needs_bed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_stands_still_is_found_with_the_stacks_of_its_processes(
    bed: Bed, hosts: ChaosHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ChaosJob(bed, hosts, bed.folder / "still", 4)
    try:
        job.until_whole(4)
        monkeypatch.setattr("chaos_job.WHOLE_S", 2.0)
        monkeypatch.setattr("chaos_job.SLOW_S", 0.5)
        slow: list[bool] = []
        for process in job.ranks()[1]:
            os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(NotWholeError, match=r"not whole after 2 s: .*slot 1 \d+ 4 "):
            job.until_whole(4, lambda: slow.append(True))
        assert slow == [True]
        assert "chaos_rank.py" in "\n".join(job.stacks())
    finally:
        job.close()
        hosts.clear()


@needs_bed
def test_what_is_left_on_a_host_is_seen(bed: Bed, hosts: ChaosHosts) -> None:
    assert hosts.left() == []
    hosts.shell("b", "touch /tmp/forgotten; echo 1 > /dev/shm/held")
    left = hosts.left()
    assert "b: /tmp/forgotten" in left
    assert "b: /dev/shm/held" in left
    hosts.shell("b", "rm /tmp/forgotten /dev/shm/held")
    hosts.shell("a", "echo 1 > /dev/shm/own")
    holder = bed.popen("a", ["sh", "-c", "exec 3< /dev/shm/own; rm /dev/shm/own; exec sleep 60"])
    try:
        until(lambda: any("pages of /dev/shm" in text for text in hosts.left()))
        assert any("sleep 60" in text for text in hosts.left())
    finally:
        holder.kill()
        holder.wait()
        hosts.clear()
    assert hosts.left() == []


@needs_bed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_exit_code_of_a_job_that_lives_or_that_nobody_has_killed_is_false(
    bed: Bed, hosts: ChaosHosts
) -> None:
    job = ChaosJob(bed, hosts, bed.folder / "false", 4)
    try:
        job.until_whole(4)
        job.kill_viewer()
        with pytest.raises(FalseEndError, match="exit code -9, but the ranks of slots 0, 1, 2, 3"):
            job.until_whole(4)
        hosts.clear()
        with pytest.raises(FalseEndError, match="said to have been killed: exit code -9"):
            job.until_whole(4)
    finally:
        job.close()
        hosts.clear()


@needs_bed
def test_a_file_that_is_slow_to_execute_waits_on_one_host_only(bed: Bed, hosts: ChaosHosts) -> None:
    hosts.slow_down("a")
    started = bed.popen("a", [hosts.python, "-c", ""])
    try:
        assert bed.run("b", [hosts.python, "-c", "print(1)"]).stdout == "1\n"
        assert started.poll() is None
        hosts.speed_up("a")
        assert started.wait(20) == 0
    finally:
        hosts.speed_up("a")
        started.kill()
        started.wait()


@needs_bed
def test_what_waits_to_be_executed_is_counted_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "quick"
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    slow = SlowExec(path)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(subprocess.run(["sh", "-c", path]).returncode)
    )
    thread.start()
    try:
        until(lambda: slow.waiting == 1)
        assert codes == []
    finally:
        slow.close()
        thread.join()
    assert codes == [3]

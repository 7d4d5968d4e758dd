"""Agents that say nothing, or end, while their ranks work: who is taken for dead, and who not."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import DEADLINE_S, until

from kolovod.launch import agent_end, remote
from kolovod.launch.agent_line import LocalLine
from kolovod.launch.death import Death, ended_by_pidfd, ended_child, exit_status, reported
from kolovod.launch.fleet import Fleet
from kolovod.launch.local import Ended, HostRanks, Order
from kolovod.launch.remote import RemoteRanks

SLEEP = ["sleep", "1000"]


class Job:
    """Two ranks of an agent on this host, started as elastic jobs start theirs."""

    def __init__(self, command: list[str] = SLEEP, ranks: int = 2) -> None:
        self.name = f"test-{secrets.token_hex(4)}"
        self.said: list[str] = []
        self.ends: list[Ended] = []
        self.ranks = self.another()
        self.ranks.start([Order(rank, command, {}) for rank in range(ranks)])
        until(lambda: len(self.pids) == ranks, "all have begun")

    def another(self) -> RemoteRanks:
        """Another launcher of the same job."""
        made = RemoteRanks("here", LocalLine(self.name), lambda *_: None, report=self.said.append)
        made.connect()
        return made

    @property
    def pids(self) -> dict[int, int]:
        return {rank: pid for rank, pid in self.ranks.pids().items() if pid}

    @property
    def agent(self) -> int:
        return int(self.ranks._hello["pid"])

    def has_said(self, text: str) -> bool:
        return any(text in each for each in self.said)

    def ended(self, count: int) -> list[Ended]:
        """The ends of so many, when they have come."""

        def collected() -> bool:
            self.ends += self.ranks.collect()
            return len(self.ends) >= count

        until(collected, f"{count} have ended")
        return sorted(self.ends, key=lambda end: end.rank)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(remote, "SILENT_AFTER_S", 1.5)
    monkeypatch.setattr(remote, "GRACE_S", 0.5)
    made = Job()
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.kill(made.agent, signal.SIGCONT)
    made.ranks.close()
    until(lambda: not any(map(psutil.pid_exists, made.pids.values())), "nothing is left")


def are_alive(job: Job) -> bool:
    return all(psutil.pid_exists(pid) for pid in job.pids.values())


def test_a_stopped_agent_is_woken_and_its_ranks_are_not_taken_for_dead(job: Job) -> None:
    os.kill(job.agent, signal.SIGSTOP)
    until(lambda: job.has_said("says nothing for 1.5 s: its ranks are taken to go on"))
    until(lambda: job.has_said("is heard again, after"))
    assert not job.ranks.collect()
    assert not job.ranks.lost
    assert job.ranks.running == {0, 1}
    assert are_alive(job)


@pytest.fixture
def asleep(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Its agent is stopped, and cannot be woken."""
    monkeypatch.setattr(agent_end, "wake", lambda pid: False)
    os.kill(job.agent, signal.SIGSTOP)
    until(lambda: job.has_said("says nothing"))
    return job


@pytest.mark.slow
def test_who_ends_meanwhile_is_seen_by_the_kernels_word_and_counted_once(asleep: Job) -> None:
    os.kill(asleep.pids[1], signal.SIGKILL)
    (end,) = asleep.ended(1)
    assert (end.rank, end.code, end.lost) == (1, -signal.SIGKILL, "")
    assert "was killed by signal 9" in end.cause
    os.kill(asleep.agent, signal.SIGCONT)  # it reports the end, too
    until(lambda: asleep.has_said("is heard again"))
    os.kill(asleep.pids[0], signal.SIGTERM)
    assert [(end.rank, end.code) for end in asleep.ended(2)] == [(0, -15), (1, -9)]


def test_an_end_that_was_reported_is_not_told_again(job: Job) -> None:
    os.kill(job.pids[1], signal.SIGTERM)
    assert [(end.rank, end.code) for end in job.ended(1)] == [(1, -signal.SIGTERM)]
    os.kill(job.agent, signal.SIGKILL)
    assert [(end.rank, end.code) for end in job.ended(2)] == [(0, -9), (1, -15)]
    until(lambda: not job.ranks._rank_monitor.watched)
    assert not job.ranks.collect()


def test_orders_to_it_hold_up_nobody(asleep: Job) -> None:
    big = {f"N{i}": "x" * 1000 for i in range(100)}
    began = time.monotonic()
    for number in range(2, 12):  # more than a socket takes
        asleep.ranks.start([Order(number, SLEEP, big)])
    asleep.ranks.send(signal.SIGTERM, [2])
    assert time.monotonic() < began + DEADLINE_S / 5
    os.kill(asleep.agent, signal.SIGCONT)
    assert [(end.rank, end.code) for end in asleep.ended(1)] == [(2, -signal.SIGTERM)]
    until(lambda: len(asleep.pids) == 12, "all have begun")


@pytest.mark.slow
def test_a_job_that_must_end_ends_them_for_sure(asleep: Job) -> None:
    pids = [asleep.agent, *asleep.pids.values()]
    asleep.ranks.send(signal.SIGKILL)
    ends = asleep.ended(2)
    assert not any(map(agent_end._is_agent, pids[:1]))
    assert [end.code for end in ends] == [-9, -9]
    assert not any(end.lost for end in ends)
    assert not asleep.ranks.may_run_on
    assert asleep.ranks.lost
    assert Fleet._is_to_reach(asleep.ranks)  # where the job goes on
    asleep.ranks.start([Order(2, SLEEP, {})])  # in vain, as on every host that is lost
    assert [bool(end.lost) for end in asleep.ended(3)] == [False, False, True]


@pytest.mark.slow
def test_where_that_cannot_be_known_it_is_said(
    asleep: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalLine, "end", lambda self, pid, ranks: "nobody is allowed to")
    asleep.ranks.send(signal.SIGKILL)
    ends = asleep.ended(2)
    assert all(end.death is None and end.code == 255 for end in ends)
    assert asleep.ranks.may_run_on
    pids = " ".join(map(str, sorted(asleep.pids.values())))
    assert asleep.has_said(f"they may run on (nobody is allowed to); 'kill -9 {pids}' there")
    assert are_alive(asleep)
    assert agent_end.end(asleep.agent, asleep.pids.values())


def test_a_killed_agent_is_proven_and_so_are_its_ranks(job: Job) -> None:
    os.kill(job.agent, signal.SIGKILL)
    ends = job.ended(2)
    assert [(end.rank, end.code, end.lost) for end in ends] == [(0, -9, ""), (1, -9, "")]
    assert "with the process that runs the ranks of this host" in ends[0].cause
    assert job.ranks.lost
    assert not job.ranks.running


@pytest.mark.slow
def test_an_agent_that_hangs_up_has_not_ended(job: Job) -> None:
    """Another launcher has come: this one knows nothing any more of who runs there."""
    other = job.another()
    ends = job.ended(2)
    assert all(end.death is None and end.lost for end in ends)
    assert are_alive(job)
    assert other.running == {0, 1}
    job.ranks.replaced()
    job.ranks.close()
    assert are_alive(job)
    job.ranks = other


# --- proof ---


def test_a_death_is_made_of_what_the_kernel_says() -> None:
    with pytest.raises(TypeError, match=r"only kolovod\.launch\.death makes a Death"):
        Death(0, "anybody")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    assert ended_child(child.pid) is None
    assert ended_by_pidfd(pidfd, child.pid, 1) is None
    assert exit_status(child.pid) is None
    child.kill()
    until(lambda: ended_child(child.pid))
    assert ended_child(child.pid) == reported(-signal.SIGKILL)
    assert ended_by_pidfd(pidfd, child.pid, 1) == reported(-signal.SIGKILL)
    child.communicate()
    assert ended_by_pidfd(pidfd, child.pid, 7) == reported(7)  # nobody can tell any more
    os.close(pidfd)


@pytest.mark.parametrize(("death", "lost"), [(None, ""), (reported(0), "its host is silent")])
def test_an_end_is_proven_or_lost(death: Death | None, lost: str) -> None:
    with pytest.raises(AssertionError, match="rank 3"):
        Ended(3, 17, death, lost=lost)


# --- what takes long ---


def test_a_signal_to_who_is_being_started_comes_when_it_is_there() -> None:
    ranks = HostRanks(lambda *_: None)
    try:
        first, second = ranks.prepare([Order(0, SLEEP, {}), Order(1, SLEEP, {})])
        assert ranks.starting == {0, 1}
        ranks.send(signal.SIGKILL, [1])
        for start in (first, second):
            start.run()
            ranks.add(start)
        assert not ranks.starting
        until(lambda: [(end.rank, end.code) for end in ranks.collect()] == [(1, -9)])
        assert ranks.running == {0}
    finally:
        ranks.close()


def test_who_cannot_be_started_has_ended() -> None:
    def popen(*_: Any, **__: Any) -> Any:
        raise OSError(11, "no more processes")

    ranks = HostRanks(lambda *_: None, popen)
    try:
        (start,) = ranks.prepare([Order(4, SLEEP, {})])
        start.run()
        ranks.add(start)
        (end,) = ranks.collect()
        assert (end.rank, end.code, end.pid) == (4, 126, 0)
        assert "could not be started: [Errno 11] no more processes" in end.cause
    finally:
        ranks.close()


EXECVE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
int execve(const char *path, char *const *arguments, char *const *environment) {
    char byte = 0;
    write(open(getenv("EXEC_SAYS"), O_WRONLY), &byte, 1);
    read(open(getenv("EXEC_HEARS"), O_RDONLY), &byte, 1);
    int (*real)(const char *, char *const *, char *const *) = dlsym(RTLD_NEXT, "execve");
    return real(path, arguments, environment);
}
"""
STARTS = """
import os, threading
from kolovod.launch.background import popen_apart
codes = []
def start():
    codes.append(popen_apart(["/bin/true"], env=dict(os.environ)).wait())  # so by execve
thread = threading.Thread(target=start)
thread.start()
with open(os.environ["EXEC_SAYS"], "rb") as said:
    said.read(1)  # it is about to execute, and waits
with open(os.environ["EXEC_HEARS"], "wb") as heard:
    heard.write(b"x")
thread.join()
print(codes)
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")
def test_a_file_that_is_slow_to_execute_holds_up_no_other_thread(tmp_path: Path) -> None:
    """Of Python 3.10 and 3.13, say; ``subprocess.Popen`` of 3.11.7 and 3.12.1 does no harm."""
    library = tmp_path / "execve.so"
    (tmp_path / "execve.c").write_text(EXECVE)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "execve.c", "-ldl"]
    subprocess.run(command, check=True)
    pipes = {name: str(tmp_path / name.lower()) for name in ("EXEC_SAYS", "EXEC_HEARS")}
    for path in pipes.values():
        os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        env={**os.environ, **pipes, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stdout == "[0]\n", done.stderr

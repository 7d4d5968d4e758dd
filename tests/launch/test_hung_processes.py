"""Which processes of an elastic job are killed since the others have nothing of them any more."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Any

import pytest

from kolovod.launch import hung_processes
from kolovod.launch.avoided_hosts import Process
from kolovod.launch.hung_processes import HungProcesses

LIMIT_S = 600.0


class Fleet:
    """Three processes run."""

    def __init__(self) -> None:
        self.running = {0, 1, 2}
        self.killed: list[tuple[int, str]] = []

    def send(self, signum: int, why: str, ranks: Collection[int]) -> None:
        assert signum == signal.SIGKILL
        self.killed += [(rank, why) for rank in ranks]


class Case:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(hung_processes.time, "monotonic", lambda: self.now_s)
        self.fleet: Any = Fleet()
        self.processes = {n: Process(n, "abc"[n], 0.0, member=n + 10) for n in range(3)}
        self.behind: set[int] = set()
        self.hung = HungProcesses(self.fleet, limit_s)

    def look(self, after_s: float) -> list[int]:
        """Who is killed, if it is looked at ``after_s`` later."""
        self.now_s += after_s
        self.fleet.killed.clear()
        self.hung.kill(lambda number: self.processes[number].member)
        self.hung.kill_left_behind(self.processes, self.behind.__contains__)
        return [number for number, _ in self.fleet.killed]


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(monkeypatch, LIMIT_S)


def test_a_member_that_hangs_is_killed_at_once_and_once(case: Case) -> None:
    case.hung.note(11, "rank 1 does not answer")
    assert case.look(0) == [1]
    ((_, why),) = case.fleet.killed
    assert "KOLOVOD_LATE_FAILURE_S" in why
    assert why.endswith("rank 1 does not answer")
    assert case.look(LIMIT_S) == []


def test_who_was_left_behind_has_the_limit_to_end(case: Case) -> None:
    case.behind = {2}
    assert (case.look(0), case.hung.kill_times()) == ([], [1000 + LIMIT_S])
    assert case.look(LIMIT_S - 1) == []
    assert case.look(1) == [2]
    assert case.look(0.5) == []
    assert case.look(0.5) == [2]  # a signal may be lost with the connection to an agent
    case.fleet.running.discard(2)
    assert (case.look(LIMIT_S), case.hung.kill_times()) == ([], [])


def test_it_has_some_seconds_where_others_wait_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, 0.5)
    case.behind = {2}
    assert case.look(0) == case.look(4.9) == []
    assert case.look(0.1) == [2]


def test_the_time_of_who_was_cut_off_begins_when_its_host_is_reached(case: Case) -> None:
    case.behind = {1}
    case.look(0)
    case.fleet.running.discard(1)  # its host is lost
    assert case.look(LIMIT_S) == []
    case.fleet.running.add(1)
    assert case.look(0) == []
    assert case.look(LIMIT_S) == [1]


def test_who_saves_what_it_has_after_an_exception_is_left_alone(case: Case) -> None:
    case.behind = {1}
    case.processes[1].has_resigned = True
    assert case.look(0) == case.look(LIMIT_S) == []


def test_without_a_limit_nobody_that_was_left_behind_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch, 0)
    case.behind = {1}
    assert (case.look(0), case.hung.kill_times(), case.look(LIMIT_S)) == ([], [], [])

"""The loop that sees a job through: its phases, and whom it ends when."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from kolovod.launch import supervisor as module
from kolovod.launch.supervisor import Phase, Policy, Supervisor

GRACE_S = 0.05


class Fleet:
    """Two processes, which end by SIGKILL only, and only by the second one each."""

    may_run_on = True

    def __init__(self) -> None:
        self.running = {0, 1}
        self.sent: list[tuple[int, str, Collection[int] | None]] = []
        self.deaf = {0, 1}
        self.closed = 0
        self.at_close: Callable[[], None] = lambda: None

    def send(self, signum: int, why: str, ranks: Collection[int] | None = None) -> None:
        self.sent.append((signum, why, ranks))
        for rank in self.running & set(self.running if ranks is None else ranks):
            if signum == signal.SIGKILL:
                (self.deaf if rank in self.deaf else self.running).discard(rank)

    def fds(self) -> list[int]:
        return []

    def needs_polling(self) -> bool:
        return False

    def pids_here(self) -> list[int]:
        return []

    def close(self) -> None:
        self.closed += 1
        self.at_close()


class Actions(Policy):
    """One action for each time that the loop looks."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], object]] = []
        self.spared: set[int] = set()
        self.fleet: Any = Fleet()
        self.notes: list[str] = []
        output: Any = self
        self.supervisor = Supervisor(self, self.fleet, output, self.notes.append)
        self.supervisor.advance(Phase.RUNNING)

    def world_size(self) -> int:
        return 2

    def look(self) -> Sequence[float | None]:
        if self.actions:
            self.actions.pop(0)()
            if self.actions:
                self.supervisor.ring()
        return [None]

    def let_leave(self, signum: int) -> float:
        return super().let_leave(signum) if signum == signal.SIGINT else 2 * GRACE_S

    def to_end(self) -> set[int] | None:
        return self.fleet.running - self.spared if self.spared else None

    def close(self) -> None:
        """End the output."""


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actions]:
    for name in ("GRACE_S", "_KILL_AGAIN_S"):
        monkeypatch.setattr(module, name, GRACE_S)
    made = Actions()
    yield made
    made.supervisor.close()


def test_what_is_stopped_is_killed_after_the_grace_and_again(policy: Actions) -> None:
    policy.actions = [lambda: policy.supervisor.stop(signal.SIGTERM, "rank 1 failed")]
    policy.supervisor.run()
    why = f"it did not end within {GRACE_S:g} s (rank 1 failed)"
    kill = (signal.SIGKILL, why, None)
    assert policy.fleet.sent == [(signal.SIGTERM, "rank 1 failed", None), kill, kill]
    assert policy.supervisor.phase is Phase.KILLING


def test_who_is_spared_is_not_killed(policy: Actions) -> None:
    policy.spared = {1}
    policy.fleet.deaf.clear()
    leave = policy.fleet.running.discard
    policy.actions = [lambda: policy.supervisor.stop(signal.SIGTERM, "")]
    threading.Timer(4 * GRACE_S, lambda: (leave(1), policy.supervisor.ring())).start()
    policy.supervisor.run()
    assert {tuple(ranks) for _, _, ranks in policy.fleet.sent if ranks} == {(0,)}


def test_some_are_ended_while_the_job_goes_on(policy: Actions) -> None:
    policy.actions = [lambda: policy.supervisor.end([1], "host b is avoided")]
    policy.actions += [lambda: None] * 3
    leave = policy.fleet.running.discard
    threading.Timer(6 * GRACE_S, lambda: (leave(0), policy.supervisor.ring())).start()
    policy.supervisor.run()
    kill = (signal.SIGKILL, "host b is avoided", {1})
    assert policy.fleet.sent == [(signal.SIGTERM, "host b is avoided", [1]), kill, kill]
    assert policy.supervisor.phase is Phase.RUNNING
    assert policy.supervisor.is_ending(1)
    assert not policy.supervisor.is_ending(0)


@pytest.mark.parametrize(("signum", "grace_s"), [("SIGINT", GRACE_S), ("SIGTERM", 2 * GRACE_S)])
def test_a_signal_of_the_users_ends_the_job(policy: Actions, signum: str, grace_s: float) -> None:
    number = signal.Signals[signum]
    policy.supervisor.signal(number)
    assert policy.supervisor.is_told_to_end()
    policy.supervisor.run()
    assert policy.supervisor.stopped_by == number
    assert policy.notes == [f"{signum}: ending 2 ranks (again: kill them)"]
    sent = [(number, ""), *2 * [(signal.SIGKILL, f"it did not end within {grace_s:g} s")]]
    assert [each[:2] for each in policy.fleet.sent] == sent


def test_a_signal_that_is_passed_on_ends_nothing(policy: Actions) -> None:
    policy.supervisor.signal(signal.SIGUSR2)
    assert not policy.supervisor.is_told_to_end()
    policy.actions = [lambda: None, policy.fleet.running.clear]
    policy.supervisor.run()
    assert policy.fleet.sent == [(signal.SIGUSR2, "", None)]
    assert (policy.supervisor.phase, policy.supervisor.stopped_by) == (Phase.RUNNING, None)


def test_a_job_goes_forward_only(policy: Actions) -> None:
    supervisor = policy.supervisor
    supervisor.advance(Phase.NAMING, 60.0)
    assert not supervisor.is_due(Phase.NAMING)
    supervisor.advance(Phase.NAMING, 0.0)  # it was entered before
    assert not supervisor.is_due(Phase.NAMING)
    supervisor.advance(Phase.LAST_WORDS, 0.0)
    assert supervisor.is_due(Phase.LAST_WORDS)
    supervisor.stop(signal.SIGTERM, "")
    supervisor.advance(Phase.LAST_WORDS, 0.0)
    assert supervisor.phase is Phase.STOPPING
    assert not supervisor.is_due(Phase.LAST_WORDS)


def test_close_releases_everything_once_and_in_order(policy: Actions) -> None:
    seen: list[int] = []
    policy.supervisor.lasting.callback(lambda: seen.append(policy.fleet.closed))
    before = len(os.listdir("/proc/self/fd"))
    policy.supervisor.close()
    policy.supervisor.close()
    policy.supervisor.signal(signal.SIGTERM)  # nobody is there to hear it
    assert (seen, policy.fleet.closed, policy.supervisor.phase) == ([1], 1, Phase.CLOSED)
    assert policy.supervisor.may_run_on
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_close_goes_on_when_the_user_interrupts_it(policy: Actions) -> None:
    def interrupt() -> None:
        if policy.fleet.closed == 1:
            raise KeyboardInterrupt

    policy.fleet.at_close = interrupt
    with pytest.raises(KeyboardInterrupt):
        policy.supervisor.close()
    assert (policy.fleet.closed, policy.supervisor.phase) == (2, Phase.CLOSED)

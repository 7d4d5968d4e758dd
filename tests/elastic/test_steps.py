"""Steps that are used by all ranks or by none, whoever is killed in the middle."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from survivors import NoLoss, Survivors, kill_soon
from waiting import Marks

import kolovod.numpy as kv
from kolovod.core.transaction import settle_by, use_transaction
from kolovod.core.world import current
from kolovod.elastic import MembershipLog, State
from kolovod.elastic.running import _settled, _share
from kolovod.elastic.steps import Steps, exactly
from kolovod.errors import CollectiveError, JobOverError, MismatchError, RankLostError
from kolovod.testing import replay

RANKS = 4
STEPS = 30


COUNTS = (3, 20_000, 300_000)


BASES = [np.random.default_rng(k).normal(size=n).astype(np.float32) for k, n in enumerate(COUNTS)]


def shares(rank: int, step: int) -> dict[str, np.ndarray]:
    """What a rank adds in a step; the bits of their sum depend on the order of addition."""
    factor = np.float32(np.sin(7 * step + rank))
    return {f"w{k}": base * factor for k, base in enumerate(BASES)}


class Weights:
    """The sums of all shares."""

    def __init__(self) -> None:
        self.values = {f"w{k}": np.zeros(count, np.float32) for k, count in enumerate(COUNTS)}

    def tensors(self) -> dict[str, np.ndarray]:
        return self.values

    def add(self, totals: Any) -> None:
        for name, total in totals.items():
            self.values[name] += total


def train(rank: int, victim: int, seed: int) -> Any:
    """Sums of all ranks' shares, added up over the steps, and who took part in each."""
    alive = [r for r in range(RANKS) if r != victim]
    kv.init()
    work = Steps(Survivors(alive), current)
    weights = Weights()
    log = MembershipLog(weights.tensors)
    for step in range(STEPS):
        if rank == victim and step == STEPS // 3:
            kill_soon(random.Random(seed).uniform(0, 0.02))
        if rank == victim and step == 2 * STEPS // 3:
            threading.Event().wait()  # it is about to be killed
        mine = shares(rank, step)
        log.follow(current().members, current().hosts, current().rank)

        def attempt(mine: dict[str, np.ndarray] = mine) -> dict[str, np.ndarray]:
            handles = {name: kv.allreduce_async(x, name, kv.Sum) for name, x in mine.items()}
            return {name: handle.wait() for name, handle in handles.items()}

        weights.add(work.run(attempt, counts=True))
        log.record(work.counted or ())
    assert work.passed == len(work.all_counted) == STEPS
    return log.state_dict(), work._recovery.times


def kill_one(victim: int, seed: int, hosts: list[str]) -> tuple[int, ...]:
    results = run_ranks(RANKS, train, victim, seed, keep_going=True, hosts=hosts)
    survivors = [results[rank] for rank in range(RANKS) if rank != victim]
    state, _ = survivors[0]
    assert all(other == state and times >= 1 for other, times in survivors)
    log = MembershipLog()
    log.load_state_dict(state)
    used = [step.used for step in log.steps]
    assert used[0] == tuple(range(RANKS))
    assert used[-1] == tuple(rank for rank in range(RANKS) if rank != victim)
    assert sorted(used, key=len, reverse=True) == used
    weights = Weights()
    replay(log, lambda step, member: shares(member, step), weights.add, weights.tensors, op=kv.Sum)
    return tuple(map(len, used))


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("hosts", [[], ["a", "a", "b", "b"]], ids=["one host", "two hosts"])
def test_a_step_is_used_by_all_survivors_or_by_none(victim: int, hosts: list[str]) -> None:
    kill_one(victim, victim, hosts)


class Held:
    """In the place of what an operation holds of its world."""


def test_a_meeting_that_failed_holds_nothing_of_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    recovery: Any = SimpleNamespace(reform=lambda error: None)
    work = Steps(recovery, current)
    held: list[weakref.ref[Held]] = []

    def meet() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        if len(held) < 3:
            raise RankLostError("as if", 2)

    monkeypatch.setattr(work, "meet", meet)
    gc.disable()
    try:
        work.recover(RankLostError("as if", 2))
        assert [ref() for ref in held] == [None] * 3
    finally:
        gc.enable()


def hear_late(rank: int, folder: Path, hears: int) -> Any:
    """Rank 2 ends when two have passed a ticket; rank ``hears`` learns that instead of its pass."""
    kv.init()
    work = Steps(Survivors([0, 1]), current)
    passed, marks = work._pass, Marks(folder)
    other = f"rank {1 - hears} has passed"

    def loses() -> None:
        if rank == 2:
            passed()
            marks.wait_for(other)  # whose result would be lost with this one
            os.kill(os.getpid(), signal.SIGKILL)
        if rank != hears or work.passed:
            passed()
            marks.make(f"rank {rank} has passed")
            return
        started = kv.allreduce_async(np.zeros(4, np.uint8), "elastic.ticket", kv.Max)
        marks.wait_for(other)
        del started  # nobody waits for it any more
        raise RankLostError("as if this rank had seen the end first", 2)

    work._pass = loses  # type: ignore[method-assign]
    tries = []

    def attempt() -> tuple[int, float]:
        tries.append(1)
        return current().size, float(kv.allreduce(np.float32(rank + 1), "w", kv.Sum))

    first = work.run(attempt)
    second = work.run(attempt)
    return first, second, len(tries), work.passed


@pytest.mark.parametrize("hears", [0, 1])
def test_who_misses_a_ticket_that_others_have_passed_uses_the_step(
    tmp_path: Path, hears: int
) -> None:
    results = run_ranks(3, hear_late, tmp_path, hears, keep_going=True)
    for rank, (first, second, tries, passed) in enumerate(results[:2]):
        assert first == (3, 6.0)  # all three, on both
        assert second == (2, 3.0)
        assert tries == (2 if rank == hears else 3)
        assert passed == 2


def lose_results(rank: int) -> Any:
    """Rank 1 says that it has passed a step of which the other has no results."""
    kv.init()
    work = Steps(Survivors([0, 1]), current)
    work.passed = rank

    def attempt() -> None:
        raise RankLostError("as if", 2)

    if rank == 1:
        work.recover(RankLostError("as if", 2))
        return
    with pytest.raises(CollectiveError, match="has completed step 1, of which this one has no"):
        work.run(attempt)


def step_unequally(rank: int) -> None:
    kv.init()
    work = Steps(Survivors([0, 1]), current)
    work.passed = 300 + rank
    with pytest.raises(MismatchError, match=f"this rank has completed {300 + rank} steps, others"):
        work.run(lambda: None)


def test_ranks_at_different_steps_are_an_error() -> None:
    run_ranks(2, step_unequally)


def test_results_that_are_missing_are_an_error() -> None:
    run_ranks(2, lose_results)


class Over(NoLoss):
    """The job ends."""

    def reform(self, error: Exception) -> None:
        raise JobOverError("nobody is left")


def end_within_a_program(rank: int) -> None:
    kv.init()
    work = Steps(Over(), current)

    def step_of_a_program() -> None:
        try:
            work.run(lose)
        except JobOverError as error:  # as frameworks do
            raise RuntimeError(f"in a thread of mine: {error}") from None

    def lose() -> None:
        raise RankLostError("rank 1 was lost", 1)

    with pytest.raises(JobOverError, match="nobody is left"):
        _settled(step_of_a_program, work)
    with pytest.raises(ValueError, match="mine"):  # while the job goes on errors are what they are
        _settled(lambda: int("mine"), Steps(NoLoss(), current))


class WithoutState(NoLoss):
    """The process that uses it has come without the job's state."""

    has_state = False


def share_nothing(rank: int) -> float:
    """Rank 0 has no state; it would overwrite that of the other."""
    kv.init()
    work = Steps(WithoutState() if rank == 0 else NoLoss(), current)
    work.begin()
    state: Any = State(value=float(rank))
    client: Any = SimpleNamespace(got_state=lambda: None)
    with pytest.raises(CollectiveError, match="rank 0 of epoch 1 has come without the state"):
        _share(state, work, client)
    kept: float = state.value
    return kept


def test_a_rank_0_without_the_state_overwrites_nobodys() -> None:
    assert run_ranks(2, share_nothing) == [0.0, 1.0]


def test_the_end_of_a_job_that_a_framework_has_called_otherwise() -> None:
    run_ranks(1, end_within_a_program)


def step_after_programs(rank: int) -> None:
    kv.init()
    begun = ["a program"]
    settle_by(begun.clear)
    assert exactly(lambda: len(begun)) == 1  # a job that is not elastic waits for nothing
    use_transaction(Steps(NoLoss(), current))
    assert exactly(lambda: len(begun)) == 0
    begun.append("another one")
    _settled(lambda: None, Steps(NoLoss(), current))
    assert not begun


def test_programs_that_were_begun_step_first() -> None:
    run_ranks(1, step_after_programs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forty_kills_tear_nothing() -> None:
    rng = random.Random(15)
    seen = {kill_one(rng.randrange(RANKS), rng.randrange(1 << 30), []) for _ in range(40)}
    assert len(seen) > 1  # the kills came in different steps

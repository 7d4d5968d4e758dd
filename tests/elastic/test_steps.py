"""Steps that are used by all ranks or by none, whoever is killed in the middle."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from survivors import NoLoss, Survivors, kill_soon

import kolovod.numpy as kv
from kolovod.core.world import current
from kolovod.elastic import steps
from kolovod.elastic.running import _settled
from kolovod.errors import CollectiveError, JobOverError, MismatchError, RankLostError

RANKS = 4
STEPS = 30


def shares(rank: int, step: int) -> list[np.ndarray]:
    """What a rank adds in a step: exact in float32, in any order of addition."""
    value = (rank + 1) * (step + 1)
    return [np.full(count, value + k, np.float32) for k, count in enumerate(COUNTS)]


COUNTS = (3, 20_000, 300_000)


def train(rank: int, victim: int, seed: int) -> Any:
    """Sums of all ranks' shares, added up over the steps, and who took part in each."""
    alive = [r for r in range(RANKS) if r != victim]
    kv.init()
    work = steps.Steps(Survivors(alive), current)
    weights = [np.zeros(count, np.float32) for count in COUNTS]
    log = []
    for step in range(STEPS):
        if rank == victim and step == STEPS // 3:
            kill_soon(random.Random(seed).uniform(0, 0.02))
        mine = shares(rank, step)

        def attempt(mine: list[np.ndarray] = mine) -> tuple[list[np.ndarray], tuple[int, ...]]:
            handles = [kv.allreduce_async(share, f"w{k}", kv.Sum) for k, share in enumerate(mine)]
            return [handle.wait() for handle in handles], current().members

        totals, members = work.exactly(attempt)
        for weight, total in zip(weights, totals, strict=True):
            weight += total
        log.append(members)
    assert work.passed == STEPS
    return [weight.tobytes() for weight in weights], log, work._recovery.times


def replay(log: list[tuple[int, ...]]) -> list[bytes]:
    """The same in one process."""
    weights = [np.zeros(count, np.float32) for count in COUNTS]
    for step, members in enumerate(log):
        for rank in members:
            for weight, share in zip(weights, shares(rank, step), strict=True):
                weight += share
    return [weight.tobytes() for weight in weights]


def kill_one(victim: int, seed: int, hosts: list[str]) -> tuple[int, ...]:
    results = run_ranks(RANKS, train, victim, seed, keep_going=True, hosts=hosts)
    survivors = [results[rank] for rank in range(RANKS) if rank != victim]
    weights, log, _ = survivors[0]
    assert all(result[:2] == (weights, log) for result in survivors)
    assert log[0] == tuple(range(RANKS))
    assert log[-1] == tuple(rank for rank in range(RANKS) if rank != victim)
    assert sorted(log, key=len, reverse=True) == log
    assert weights == replay(log)
    assert all(times >= 1 for _, _, times in survivors)
    return tuple(map(len, log))


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("hosts", [[], ["a", "a", "b", "b"]], ids=["one host", "two hosts"])
def test_a_step_is_used_by_all_survivors_or_by_none(victim: int, hosts: list[str]) -> None:
    kill_one(victim, victim, hosts)


def hear_late(rank: int, folder: Path, hears: int) -> Any:
    """Rank 2 ends when it has passed a ticket; rank ``hears`` learns that instead of its pass."""
    kv.init()
    work = steps.Steps(Survivors([0, 1]), current)
    passed = work._pass

    def loses() -> None:
        if rank == 2:
            passed()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank != hears or work.passed:
            passed()
            (folder / f"passed.{rank}").touch()
            return
        started = kv.allreduce_async(np.zeros(4, np.uint8), "elastic.ticket", kv.Max)
        while not (folder / f"passed.{1 - rank}").exists():
            time.sleep(0.01)
        del started  # nobody waits for it any more
        raise RankLostError("as if this rank had seen the end first", 2)

    work._pass = loses  # type: ignore[method-assign]
    tries = []

    def attempt() -> tuple[int, float]:
        tries.append(1)
        return current().size, float(kv.allreduce(np.float32(rank + 1), "w", kv.Sum))

    first = work.exactly(attempt)
    second = work.exactly(attempt)
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
    work = steps.Steps(Survivors([0, 1]), current)
    work.passed = rank

    def attempt() -> None:
        raise RankLostError("as if", 2)

    if rank == 1:
        work.recover(RankLostError("as if", 2))
        return
    with pytest.raises(CollectiveError, match="has completed step 1, of which this one has no"):
        work.exactly(attempt)


def step_unequally(rank: int) -> None:
    kv.init()
    work = steps.Steps(Survivors([0, 1]), current)
    work.passed = 300 + rank
    with pytest.raises(MismatchError, match=f"this rank has completed {300 + rank} steps, others"):
        work.exactly(lambda: None)


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
    work = steps.Steps(Over(), current)

    def step_of_a_program() -> None:
        try:
            work.exactly(lose)
        except JobOverError as error:  # as frameworks do
            raise RuntimeError(f"in a thread of mine: {error}") from None

    def lose() -> None:
        raise RankLostError("rank 1 was lost", 1)

    with pytest.raises(JobOverError, match="nobody is left"):
        _settled(step_of_a_program, work)
    with pytest.raises(ValueError, match="mine"):  # while the job goes on errors are what they are
        _settled(lambda: int("mine"), steps.Steps(NoLoss(), current))


def test_the_end_of_a_job_that_a_framework_has_called_otherwise() -> None:
    run_ranks(1, end_within_a_program)


def step_after_programs(rank: int) -> None:
    kv.init()
    begun = ["a program"]
    steps.settle_by(begun.clear)
    assert steps.exactly(lambda: len(begun)) == 1  # a job that is not elastic waits for nothing
    steps.enter(steps.Steps(NoLoss(), current))
    assert steps.exactly(lambda: len(begun)) == 0
    begun.append("another one")
    _settled(lambda: None, steps.Steps(NoLoss(), current))
    assert not begun


def test_programs_that_were_begun_step_first() -> None:
    run_ranks(1, step_after_programs)


@pytest.mark.slow
def test_forty_kills_tear_nothing() -> None:
    rng = random.Random(15)
    seen = {kill_one(rng.randrange(RANKS), rng.randrange(1 << 30), []) for _ in range(40)}
    assert len(seen) > 1  # the kills came in different steps

"""LocalSGD and DiLoCo in an elastic job of which a rank is killed, wherever it is; replayed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from forked import run_torch_ranks
from seldom_elastic import CASES, Replay, begin, compute, sums
from survivors import Survivors

import kolovod.torch as kv
from kolovod.core.world import current
from kolovod.elastic import steps
from kolovod.errors import CollectiveAbortedError
from kolovod.gradients import seldom

RANKS, STEPS, SEED = 3, 19, 5


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, function: Callable[..., Any], *, after: Callable[[], None]) -> Any:
    """``function``, after whose call of that number, from 0, ``after`` is called as well."""
    left = number

    def called(*arguments: Any) -> Any:
        nonlocal left
        result = function(*arguments)
        left -= 1
        if left == -1:
            after()
        return result

    return called


def abort() -> None:
    ongoing = steps.ongoing()
    assert ongoing is not None
    ongoing.passed -= 1
    raise CollectiveAbortedError("as if this rank had missed it")


def prepare(where: str, number: int, ongoing: Any, rank: int, victim: int) -> None:
    """Have the victim die in an exchange, or the others miss the end of it."""
    if where == "torn" and rank == max(r for r in range(RANKS) if r != victim):
        ongoing._pass = at_call(number, ongoing._pass, after=abort)
    if rank != victim:
        return
    if where == "sending":
        before = at_call(number, lambda *_: None, after=die)
        attempt = seldom.Sent.attempt
        seldom.Sent.attempt = lambda self: before() or attempt(self)
    if where == "results":
        before_pass = at_call(number, lambda: None, after=die)
        passes = ongoing._pass
        ongoing._pass = lambda: before_pass() or passes()
    if where in ("ticket", "torn"):
        ongoing._pass = at_call(number, ongoing._pass, after=die)


def train(rank: int, case: str, where: str, number: int, victim: int) -> Any:
    kv.init()
    model, inner, way = begin(case, SEED)
    alive = [r for r in range(RANKS) if r != victim]
    ongoing = steps.Steps(Survivors(alive), current, entered=way.enter_world)
    steps.enter(ongoing)
    ongoing.begin()
    prepare(where, number, ongoing, rank, victim)
    log, found = [], []

    def note() -> None:
        assert way.has_exchanged == bool(ongoing.all_counted)
        log.extend(ongoing.all_counted)
        ongoing.all_counted = []
        way.committed()
        found.append(sums(model, way))

    for step in range(1, STEPS + 1):
        if rank == victim and where == "between" and step == number:
            die()
        compute(model, rank, step)
        inner.step()
        note()
    way.synchronize()
    note()
    steps.enter(None)
    return log, found


def check(case: str, where: str, number: int, victim: int) -> None:
    results = run_torch_ranks(RANKS, train, case, where, number, victim, keep_going=True)
    survivors = {rank: results[rank] for rank in range(RANKS) if rank != victim}
    first, second = survivors.values()
    assert first[0] == second[0]
    assert len(first[0][0]) == RANKS or where == "between"
    assert first[0][-1] == tuple(survivors)
    assert first[1][-1] == second[1][-1]  # after synchronize
    replay = Replay(case, SEED, tuple(range(RANKS)), first[0])
    for step in range(STEPS + 1):
        if step < STEPS:
            replay.step()
        else:
            replay.synchronize()
        for rank, (_, found) in survivors.items():
            assert replay.sums(rank) == found[step], f"step {step + 1} of rank {rank}"
    assert not replay.log


PLACES = [
    ("local sgd", "between", 9, 0),  # warm-up: exchanges 0 to 2, then after steps 6, 10, ...
    ("local sgd", "results", 1, 1),
    ("local sgd", "torn", 3, 2),
    ("diloco", "sending", 1, 0),
    ("diloco", "ticket", 1, 1),
    ("warmed up", "results", 2, 2),
    ("fragments", "between", 7, 0),  # of its three fragments one is applied then, two are sent
    ("fragments", "results", 2, 1),
    ("fragments", "torn", 3, 0),
    ("late", "between", 5, 1),  # sent after step 4, applied after step 6
]


@pytest.mark.parametrize("place", PLACES, ids=[f"{case}, {where}" for case, where, *_ in PLACES])
def test_survivors_exchange_what_they_kept(place: tuple[str, str, int, int]) -> None:
    check(*place)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", ["between", "sending", "results", "ticket", "torn"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_wherever_the_kill_comes(case: str, where: str, number: int) -> None:
    check(case, where, 3 * number if where == "between" else number, number % RANKS)

"""LocalSGD and DiLoCo in an elastic job of which a rank is killed, wherever it is; replayed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import run_torch_ranks
from seldom_elastic import CASES, Replay, begin, compute, model_of, optimizers_of, sums
from survivors import NoLoss, Survivors

import kolovod.torch as kv
from kolovod import elastic
from kolovod.core.world import current
from kolovod.elastic import running, steps
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError
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
    ("a state", "between", 9, 0),
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


def alone_in_a_job(rank: int) -> None:
    """What is refused, and what a commit says where nobody is lost."""
    kv.init()
    ongoing = steps.Steps(NoLoss(), current)
    steps.enter(ongoing)
    model, inner, way = begin("diloco", SEED)
    compute(model, rank, 1)
    with pytest.raises(InvalidArgumentError, match="diloco is not in the state of this elastic"):
        inner.step()
    way.enter_world()
    for name, value in (("model", model), ("adam", inner)):
        with pytest.raises(InvalidArgumentError, match=f"leave {name} out"):
            elastic.State(way=way, **{name: value}).sync()
    pair = kv.add_process_set([0])
    for wrong, match in (
        ({"process_set": pair}, "which ends with its world"),
        ({"optimizer": kv.DistributedOptimizer(inner)}, "optimizer is a DistributedOptimizer"),
    ):
        given = {"model": model, "optimizer": optimizers_of(model)[0], "sync_every": 2, **wrong}
        with pytest.raises(InvalidArgumentError, match=match):
            kv.LocalSGD(**given).enter_world()
    steps.enter(None)
    kv.barrier()
    kv.shutdown()


def test_what_is_refused() -> None:
    run_torch_ranks(2, alone_in_a_job)
    model = model_of(SEED)
    local = kv.LocalSGD(model, optimizers_of(model)[0], 2)
    state = elastic.State(local=local, sampler=elastic.ElasticSampler(range(4), 1))
    with pytest.raises(InvalidArgumentError, match="an ElasticSampler beside a LocalSGD"):
        elastic.run(lambda state: None)(state)
    with pytest.raises(InvalidArgumentError, match='leave out redo="recompute"'):
        elastic.run(lambda state: None, redo="recompute")(elastic.State(local=local))


def shared(rank: int, case: str) -> Any:
    """Rank 1 comes when rank 0 has taken steps; then rank 0 when rank 1 has."""
    kv.init()
    steps.enter(steps.Steps(NoLoss(), current))
    model, inner, way = begin(case, rank)
    state = elastic.State(way=way)
    way.enter_world()
    found = []
    for late in (1, 0):
        if rank != late:
            way._exchange.before_step()
        before = sums(model, way)
        state.sync()
        found.append((before, sums(model, way), inner.param_groups[0]["lr"]))
        inner.param_groups[0]["lr"] = 0.1 * rank
        model[0].weight.data.add_(rank + 1)
    steps.enter(None)
    kv.shutdown()
    return found


@pytest.mark.parametrize("case", ["local sgd", "fragments"])
def test_who_has_steps_of_its_own_keeps_them(case: str) -> None:
    first, second = run_torch_ranks(2, shared, case)
    assert second[0][0] != second[0][1] == first[0][0]  # rank 1 is a copy of rank 0
    assert second[0][2] == first[0][2]
    for before, after, _ in (*first, second[1]):
        assert before == after
    assert (first[1][2], second[1][2]) == (0.0, 0.1)


def in_a_process_set(rank: int) -> Any:
    """Ranks 0 to 2 of four; rank 0 is lost, and rank 3 steps alone all the time."""
    kv.init()
    pair = elastic.ProcessSet([0, 1, 2])
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(weight.weight, 0.0)
    sgd = torch.optim.SGD(weight.parameters(), 1.0)
    way = kv.LocalSGD(weight, sgd, 2, process_set=pair)
    state = elastic.State(way=way, pair=pair)
    form = running._first_in_a_world(state, 4)
    ongoing = steps.Steps(Survivors([1, 2, 3]), current, entered=form)
    steps.enter(ongoing)
    ongoing.begin()
    found = []
    for step in range(4):
        if rank == 0 and step == 2:
            die()
        weight.weight.grad = torch.full((1, 1), -float(10**rank))
        sgd.step()
        found.append(float(weight.weight))
    steps.enter(None)
    return found


def test_in_a_process_set() -> None:
    _, second, third, fourth = run_torch_ranks(4, in_a_process_set, keep_going=True)
    assert second == [10, 74, 84, 184]  # (2 + 20 + 200) / 3, and the mean of 20 and 200 more
    assert third == [100, 74, 174, 184]
    assert fourth == [1000, 2000, 3000, 4000]


def test_commit_between_exchanges_says_nothing() -> None:
    """Also where the job is not elastic: a log has an entry for each exchange."""

    def noted(state: Any) -> list[int]:
        model, inner, way = begin("diloco", SEED)
        log = elastic.MembershipLog(model.state_dict)
        state = elastic.State(way=way, log=log)
        entries = []
        for step in range(1, 10):
            compute(model, 0, step)
            inner.step()
            state.commit()
            entries.append(len(log.steps))
        return entries

    kv.init()
    assert elastic.run(noted)(elastic.State()) == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    kv.shutdown()

"""LocalSGD and DiLoCo in elastic jobs: what is refused, shared and kept to a process set.

Steps of which a rank is killed, wherever it is: tests/elastic/test_step_table.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dying import die
from forked import run_torch_ranks
from periodic_elastic import begin, compute, model_of, optimizers_of, sums
from survivors import NoLoss, Survivors

import kolovod.torch as kv
from kolovod import elastic
from kolovod.core.transaction import use_transaction
from kolovod.core.world import current
from kolovod.elastic import running
from kolovod.elastic.steps import Steps
from kolovod.errors import InvalidArgumentError

RANKS, STEPS, SEED = 3, 19, 5


def alone_in_a_job(rank: int) -> None:
    """What is refused, and what a commit says where nobody is lost."""
    kv.init()
    ongoing = Steps(NoLoss(), current)
    use_transaction(ongoing)
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
    use_transaction(None)
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
    use_transaction(Steps(NoLoss(), current))
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
    use_transaction(None)
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
    ongoing = Steps(Survivors([1, 2, 3]), current, entered=form)
    use_transaction(ongoing)
    ongoing.begin()
    found = []
    for step in range(4):
        if step == 2:
            die(rank, 0)
        weight.weight.grad = torch.full((1, 1), -float(10**rank))
        sgd.step()
        found.append(float(weight.weight))
    use_transaction(None)
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

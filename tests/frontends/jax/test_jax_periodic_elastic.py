"""local_sgd and diloco of JAX in an elastic job: a rank is killed, and who joins is a copy."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import periodic_replay as replay
import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed
from periodic_members import Replay
from slow import slow_but
from survivors import NoLoss, Survivors

from kolovod.core.transaction import use_transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps
from kolovod.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(150),
]
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
RANKS, STEPS, EVERY = 3, 19, 4
THIRDS = ((0,), (1,), (2,))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "local sgd": ({}, {}),
    "diloco": ({}, {}),
    "fragments": (
        {"fragments": 3, "fragment_sync_delay": 2, "local_share": 0.25},
        {"fragments": THIRDS, "delay": 2, "share": 0.25},
    ),
}


def training_of(case: str, offset: float = 0.0) -> tuple[Any, Any]:
    """A LocalTraining, and its jitted step: ``step(params, opt_state, rank, number)``."""
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    inner = optax.sgd(replay.RATE, momentum=replay.MOMENTUM)
    outer = optax.sgd(replay.OUTER_RATE, momentum=replay.OUTER_MOMENTUM, nesterov=True)
    if case == "local sgd":
        way = kv.local_sgd(inner, EVERY)
    else:
        way = kv.diloco(inner, outer, EVERY, **CASES[case][0])
    params = [jnp.asarray(leaf) for leaf in replay.start()]
    state = way.init(params)  # which compares values with the other ranks, outside of elastic jobs

    def step(params: Any, opt_state: Any, rank: Any, number: Any) -> Any:
        grads = [replay.gradient(p, rank, number, place) for place, p in enumerate(params)]
        updates, opt_state = way.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    training = kv.LocalTraining(way, [leaf + offset for leaf in params], state)
    return training, jax.jit(step, donate_argnums=(0, 1))


def arrays(tree: Any) -> list[Any]:
    import jax

    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, case: str, where: str, number: int, victim: int) -> Any:
    """The victim dies before a step, or with the results and without the ticket of an exchange."""
    import kolovod.jax as kv

    kv.init()
    training, step = training_of(case)
    alive = [r for r in range(RANKS) if r != victim]
    ongoing = Steps(Survivors(alive), current, entered=training.enter_world)
    use_transaction(ongoing)
    ongoing.begin()
    if where == "exchange" and rank == victim:
        passes = ongoing._pass
        left = iter(range(number))
        ongoing._pass = lambda: passes() if next(left, None) is not None else die()  # type: ignore[method-assign]
    log, found = [], []

    def note() -> None:
        assert training.has_exchanged == bool(ongoing.all_counted)
        log.extend(ongoing.all_counted)
        ongoing.all_counted = []
        training.committed()
        found.append(arrays(training.params))

    for turn in range(STEPS):
        if rank == victim and where == "between" and turn == number:
            die()
        assert training.step(step, rank, turn) is None
        note()
    training.synchronize()
    note()
    use_transaction(None)
    return log, found


def check(case: str, where: str, number: int, victim: int) -> None:
    results = run_ranks(RANKS, train, case, where, number, victim, keep_going=True, timeout_s=120)
    survivors = {rank: results[rank] for rank in range(RANKS) if rank != victim}
    (log, first), (other, second) = survivors.values()
    assert log == other
    assert log[0] == tuple(range(RANKS)) or where == "between" or number == 0
    assert log[-1] == tuple(survivors)
    for one, another in zip(first[-1], second[-1], strict=True):
        np.testing.assert_array_equal(one, another)
    if case == "local sgd":
        check_local_sgd(log, {rank: found for rank, (_, found) in survivors.items()})
        return
    alone = Replay(tuple(range(RANKS)), log, EVERY, **CASES[case][1])
    for turn in range(STEPS + 1):
        alone.step() if turn < STEPS else alone.synchronize()
        for rank, (_, found) in survivors.items():
            right = alone.common if turn == STEPS else alone.ranks[rank].parameters
            for mine, wanted in zip(found[turn], right, strict=True):
                np.testing.assert_allclose(mine, wanted, 1e-11, 1e-12)
    assert not alone.log


def check_local_sgd(log: list[tuple[int, ...]], found: dict[int, Any]) -> None:
    ranks = {rank: replay._Rank() for rank in range(RANKS)}
    for turn in range(STEPS + 1):
        if turn < STEPS:
            for rank, each in ranks.items():
                each.step(each.gradients(rank, turn))
        if turn == STEPS or (turn + 1) % EVERY == 0:
            ranks = {rank: ranks[rank] for rank in log.pop(0)}
            mean = replay._mean([each.parameters for each in ranks.values()])
            for each in ranks.values():
                each.parameters = [p.copy() for p in mean]
        for rank, mine in found.items():
            for array, wanted in zip(mine[turn], ranks[rank].parameters, strict=True):
                np.testing.assert_allclose(array, wanted, 1e-11, 1e-12)
    assert not log


PLACES = [
    ("local sgd", "between", 5, 0),
    ("local sgd", "exchange", 1, 2),
    ("diloco", "between", 10, 1),
    ("diloco", "exchange", 2, 0),
    ("fragments", "between", 5, 2),  # of its three fragments two wait to be sent then
    ("fragments", "exchange", 3, 1),
]


@pytest.mark.parametrize(
    "place",
    slow_but([PLACES[1], PLACES[4]], PLACES),
    ids=lambda place: f"{place[0]}, {place[1]}",
)
def test_survivors_go_on(place: tuple[str, str, int, int]) -> None:
    check(*place)


def joined(rank: int, case: str) -> Any:
    """Rank 1 comes when rank 0 has trained; then both have, and what waits arrives."""
    import kolovod.jax as kv
    from kolovod import elastic

    kv.init()
    training, step = training_of(case, offset=float(rank))
    use_transaction(Steps(NoLoss(), current))
    with pytest.raises(InvalidArgumentError, match=r"training=|as in elastic.State\(\w+=kv.Local"):
        training.step(step, rank, 0)
    training.enter_world()
    state = elastic.State(training=training)
    found = []
    for late in (1, None):
        if rank != late:  # steps without an exchange
            for number in range(late or 2):
                training.step(step, rank, number)
        before = arrays(training.whole())
        arrived = 0 if late else len(list(training.drain_exchanges()))
        state.sync()
        found.append((before, arrays(training.whole())))
    own = training._own()
    waits = None if getattr(own, "waits", None) is None else np.array(own.waits).tolist()
    use_transaction(None)
    kv.barrier()
    kv.shutdown()
    return found, (waits, arrived)


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("case", slow_but(["fragments"], CASES))
def test_who_joins_is_a_copy(case: str) -> None:
    ((first, later), waiting), ((second, last), others_wait) = run_ranks(2, joined, case)
    assert same(*first)
    assert not same(second[0], first[0])
    assert same(second[1], first[1])
    assert waiting == others_wait == (([0, 2, 0], 1) if case == "fragments" else (None, 0))
    if case != "fragments":
        assert same(*later)
        assert same(*last)
    assert not same(later[1], last[1])  # steps of their own


def refusals(rank: int) -> None:
    import optax

    import kolovod.jax as kv

    kv.init()
    training, _ = training_of("diloco")
    way = training._way
    params, inner = training.params, optax.sgd(0.1)
    local_sgd = kv.local_sgd(inner, 4)
    state = local_sgd.init(params)
    with pytest.raises(InvalidArgumentError, match=r"give what kv\.local_sgd or kv"):
        kv.LocalTraining(optax.chain(local_sgd), params, state)
    with pytest.raises(InvalidArgumentError, match="opt_state has 0 times a LocalSGDState in it"):
        kv.LocalTraining(local_sgd, params, way.init(params))
    made = kv.LocalTraining(local_sgd, params, (state, 1))
    with pytest.raises(InvalidArgumentError, match="<lambda> has returned a list: let it return"):
        made.step(lambda *given: list(given))
    assert made.step(lambda params, state: (params, state, 1, 2)) == (1, 2)
    over = kv.LocalTraining(
        wrong := kv.local_sgd(kv.DistributedOptimizer(inner), 4), params, wrong.init(params)
    )
    use_transaction(Steps(NoLoss(), current))
    with pytest.raises(InvalidArgumentError, match="inner is a DistributedOptimizer: in an elas"):
        over.enter_world()
    with pytest.raises(InvalidArgumentError, match=r"local_sgd=kv.LocalTraining\(local_sgd, par"):
        local_sgd.update(params, state, params)
    use_transaction(None)
    kv.shutdown()


def test_what_is_refused() -> None:
    run_ranks(1, refusals)

"""local_sgd and diloco: against the same in one process, and in PyTorch; what they refuse."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import periodic_replay as replay
import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(170),
]
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
HALVES = {"a": 0, "b": 1, "c": 0}
THIRDS = ((0,), (1,), (2,))
CASES = {
    "plain": ({}, {}),
    "parts that are late, after a warm-up": (
        {"fragments": 3, "fragment_sync_delay": 1, "local_share": 0.25, "warm_up_steps": 3},
        {"fragments": THIRDS, "delay": 1, "share": 0.25, "warm": 3},
    ),
    "late, of a tree": (
        {"fragments": HALVES, "fragment_sync_delay": 2},
        {"fragments": ((0, 2), (1,)), "delay": 2, "share": 0.5},
    ),
}
STEPS, EVERY = 11, 4


def tree(leaves):
    import jax.numpy as jnp

    return {name: jnp.asarray(leaf) for name, leaf in zip(replay.NAMES, leaves, strict=True)}


def optimizers():
    import optax

    inner = optax.sgd(replay.RATE, momentum=replay.MOMENTUM)
    return inner, optax.sgd(replay.OUTER_RATE, momentum=replay.OUTER_MOMENTUM, nesterov=True)


def stepper(optimizer, rank, inside=True):
    """``step(params, state, number)``: one step, from 0."""
    import jax
    import optax

    def step(params, state, number):
        grads = {
            name: replay.gradient(params[name], rank, number, place)
            for place, name in enumerate(replay.NAMES)
        }
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)) if inside else step


def train(optimizer, rank, steps=STEPS, inside=True):
    params = tree(replay.start())
    state = optimizer.init(params)
    step = stepper(optimizer, rank, inside)
    for number in range(steps):
        params, state = step(params, state, number)
    return params, state


def assert_close(params, wanted):
    for name, right in zip(replay.NAMES, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(params[name]), right, 1e-12, 1e-13)


def operations():
    from kolovod.core.world import current

    return current().engine.stats()["operations"]


def as_in_one_process(rank, size):
    import kolovod.jax as kv

    kv.init()
    for case, (options, same) in CASES.items():
        diloco = kv.diloco(*optimizers(), EVERY, **options)
        params, state = train(diloco, rank, inside=case != "plain")
        alone = replay.DiLoCo(size, EVERY, **same)
        assert_close(params, alone.run(STEPS)[rank])
        assert_close(state.common, alone.common)
        params, state = diloco.synchronize(params, state)
        assert_close(params, alone.synchronize())
        mine = [np.asarray(leaf).tobytes() for leaf in (*params.values(), *state.common.values())]
        assert kv.allgather_object(mine) == [mine] * size
        params, state = stepper(diloco, rank, inside=False)(params, state, STEPS)  # nothing waits
        assert_close(params, alone.run(1)[rank])
    for warm in (0, 3):
        local_sgd = kv.local_sgd(optimizers()[0], EVERY, warm_up_steps=warm)
        params, state = train(local_sgd, rank)
        assert_close(params, replay.local_sgd(size, STEPS, EVERY, warm)[rank])
        params, state = local_sgd.synchronize(params, state)
        mine = [np.asarray(leaf).tobytes() for leaf in params.values()]
        assert kv.allgather_object(mine) == [mine] * size
    kv.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_as_in_one_process(size):
    run_ranks(size, as_in_one_process, size, timeout_s=150)


@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("case", CASES)
def test_pytorch_comes_to_the_same(case):
    """To what the JAX ranks are compared with, too."""
    import torch
    from torch_loopback import run

    import kolovod.torch as kv

    options, same = CASES[case]
    wanted = replay.DiLoCo(2, EVERY, **same).run(STEPS)

    def work(verbs, rank):
        model = torch.nn.ParameterDict(
            {n: torch.tensor(v) for n, v in zip(replay.NAMES, replay.start(), strict=True)}
        )
        inner = torch.optim.SGD(model.parameters(), lr=replay.RATE, momentum=replay.MOMENTUM)
        outer = torch.optim.SGD(
            model.parameters(), replay.OUTER_RATE, momentum=replay.OUTER_MOMENTUM, nesterov=True
        )
        given = dict(options)
        if given.get("fragments") == HALVES:
            given["fragments"] = [[model["a"], model["c"]], [model["b"]]]
        kv.DiLoCo(model, inner, outer, EVERY, verbs=verbs, **given)
        for number in range(STEPS):
            for place, parameter in enumerate(model.parameters()):
                parameter.grad = replay.gradient(parameter.detach(), rank, number, place)
            inner.step()
        return {name: parameter.detach().numpy() for name, parameter in model.items()}

    for found, right in zip(run(2, work), wanted, strict=True):
        assert_close(found, right)


def exchanges(rank):
    """Only in the steps that have one; from a checkpoint it goes on alike; and in a process set."""
    import jax

    import kolovod.jax as kv

    kv.init()
    late = {"fragments": 2, "fragment_sync_delay": 2}
    diloco = kv.diloco(*optimizers(), 5, **late)
    params = tree(replay.start())
    state, step = diloco.init(params), stepper(diloco, rank)
    counts, saved = [], {}
    for number in range(13):
        before = operations()
        params, state = jax.block_until_ready(step(params, state, number))
        counts.append(operations() - before)
        saved[number] = pickle.dumps(jax.tree.map(np.asarray, (params, state)))
    assert [n + 1 for n, count in enumerate(counts) if count] == [4, 7, 9, 12]
    assert set(counts) == {0, 1}
    again = kv.diloco(*optimizers(), 5, **late)
    assert jax.tree.structure(jax.eval_shape(again.init, params)) == jax.tree.structure(state)
    step = stepper(again, rank)
    for number in (2, 5):  # while a fragment waits, too
        resumed = jax.tree.map(jax.numpy.asarray, pickle.loads(saved[number]))
        for further in range(number + 1, 13):
            resumed = step(*resumed, further)
        for mine, wanted in zip(*map(jax.tree.leaves, (resumed, (params, state))), strict=True):
            np.testing.assert_array_equal(mine, wanted)

    pair = kv.add_process_set([0, 2])
    members = kv.diloco(*optimizers(), 2, process_set=pair)
    params, state = train(members, rank, steps=4, inside=rank > 0)
    if rank == 1:
        assert_close(params, replay_alone(1, 4))
    else:
        everyone = kv.allgather(params["a"][None], process_set=pair)
        np.testing.assert_allclose(everyone[0], everyone[1], 1e-12)
    kv.shutdown()


def replay_alone(rank, steps):
    """DiLoCo of one rank, every 2 steps."""
    alone = replay.DiLoCo(1, 2)
    alone.ranks[0].gradients = lambda _, step: type(alone.ranks[0]).gradients(
        alone.ranks[0], rank, step
    )
    return alone.run(steps)[0]


def test_when_it_communicates():
    run_ranks(3, exchanges, timeout_s=150)


def refusals(rank):
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    inner, outer = optimizers()
    params = tree(replay.start())
    for wrong, text in (
        ({"sync_every": 0}, "sync_every is 0: give an int of at least 1"),
        ({"warm_up_steps": -1}, "warm_up_steps is -1"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay is 4: it must be less than sync_every"),
        ({"fragments": 5}, "5 fragments cannot take turns in 4 steps"),
        ({"fragments": True}, "fragments is True"),
        ({"local_share": 1.5}, "local_share is 1.5: give a number from 0 to 1"),
        ({"compression": "int4"}, "compression is 'int4'"),
        ({"inner": 0.1}, "inner is a float: give an optax.GradientTransformation"),
        ({"outer": None}, "outer is a NoneType"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            kv.diloco(**{"inner": inner, "outer": outer, "sync_every": 4, **wrong})
    for fragments, text in (
        (4, "fragments is 4: there are 3 parameters and 4 steps"),
        ({"a": 0, "b": 2, "c": 0}, "from 0 and without gaps"),
        ({"a": 0, "z": 1}, "a pytree of ints like the parameters"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            kv.diloco(inner, outer, 4, fragments=fragments).init(params)
    with pytest.raises(InvalidArgumentError, match=r"params\['n'\] is of int64: only floats"):
        kv.local_sgd(inner, 4).init({"n": jnp.ones(3, int)})
    for made in (kv.diloco(inner, outer, 4), kv.local_sgd(inner, 4)):
        assert isinstance(made, optax.GradientTransformationExtraArgs)
        state = made.init(params)
        with pytest.raises(InvalidArgumentError, match="params is None"):
            made.update(params, state)

    with pytest.raises(MismatchError, match="rank 0 has 'sync_every' 4, rank 1 has 'sync_every' 5"):
        kv.local_sgd(inner, 4 + rank).init(params)
    with pytest.raises(MismatchError, match=r"the values of \['b'\]"):
        kv.diloco(inner, outer, 4).init({**params, "b": params["b"] + rank})
    traced = kv.diloco(inner, outer, 4, fragments=1 + rank)
    state = jax.jit(traced.init)(params)
    with pytest.raises(MismatchError, match="'fragments'"):
        jax.jit(traced.update)(params, state, params)
    sys.modules["optax"] = None  # as if it were not installed
    with pytest.raises(ImportError, match="local_sgd is a transformation of optax: install it"):
        kv.local_sgd(inner, 4)
    kv.barrier()
    kv.shutdown()


def test_what_is_refused():
    run_ranks(2, refusals, timeout_s=100)


def between_hosts(rank, compression):
    """Synchronous within a host, DiLoCo between the two, in four bits."""
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    host = [kv.add_process_set(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    inner = kv.DistributedOptimizer(optax.adam(1e-2), process_set=host)
    compression = getattr(kv.Compression, compression)
    diloco = kv.diloco(inner, optimizers()[1], 4, fragments=2, compression=compression)
    params = {
        "w": jnp.linspace(-1, 1, 4096, dtype=jnp.float32).reshape(64, 64),
        "b": jnp.zeros(64, jnp.float32),
    }
    state = diloco.init(params)

    @jax.jit
    def step(params, state, number):
        grads = jax.tree.map(lambda p: p + jnp.sin(p * (rank + number)), params)
        updates, state = diloco.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(10):
        params, state = step(params, state, number)
    flat = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(params)])
    of_all = np.asarray(kv.allgather(flat[None]))
    np.testing.assert_array_equal(of_all[::2], of_all[1::2])
    assert (of_all[0] != of_all[2]).any()
    params, state = diloco.synchronize(params, state)
    mine = np.asarray(params["w"])
    assert kv.allgather_object(mine.tobytes()) == [mine.tobytes()] * 4
    kv.shutdown()
    return mine


@pytest.mark.slow
def test_between_hosts_with_ranks_that_step_together():
    hosts = ["a", "a", "b", "b"]
    exact = run_ranks(4, between_hosts, "none", hosts=hosts, timeout_s=150)[0]
    coded = run_ranks(4, between_hosts, "int4", hosts=hosts, timeout_s=150)[0]
    assert 0 < abs(exact - coded).max() < 0.05

"""Optimizers whose state is in parts on the ranks: as without parts, bit for bit."""

from __future__ import annotations

import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed
from slow import thorough_but

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(170),
]
# With its usual optimizations LLVM makes one instruction (fma) of a product and a sum in the middle
# of some loops and two at their ends, which are elsewhere in parts. Without them bits can be equal.
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
LIMIT_S = 150
STEPS = 4
SHAPES = {  # more than a bucket; with and without padding; a few of each dtype
    "wide": ((700, 400), "float32"),
    "odd": ((97, 91), "float32"),
    "even": ((24, 8), "float32"),
    "bias": ((7,), "float32"),
    "scalar": ((), "float32"),
    "deep": ((3, 5, 7), "bfloat16"),
    "none": ((3, 0), "float32"),
    "long": ((31,), "float64"),
}
KINDS = ("adamw", "adam", "rmsprop", "lion", "momentum", "adagrad", "sgd", "adam")
"""One for each of these arrays, where all are tried at once."""


def start():
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    return {name: jnp.asarray(draw.normal(size=s), dtype) for name, (s, dtype) in SHAPES.items()}


def gradients(step, rank):
    """Multiples of 1/64, whose sums are exact in any order."""
    import jax.numpy as jnp

    draw = np.random.default_rng(100 * step + rank + 1)
    return {
        name: jnp.asarray(draw.integers(-64, 65, size=s) / 64, dtype)
        for name, (s, dtype) in SHAPES.items()
    }


def optimizers():
    import jax
    import optax

    def matrices(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    kinds = {
        "sgd": optax.sgd(0.1),
        "momentum": optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9, nesterov=True),
        "adam": optax.adam(1e-2),
        "adamw": optax.adamw(optax.warmup_constant_schedule(0.0, 1e-2, 3), mask=matrices),
        "rmsprop": optax.rmsprop(1e-2, momentum=0.5, centered=True),
        "lion": optax.lion(1e-3),
        "adagrad": optax.adagrad(1e-2),
    }
    labels = dict(zip(SHAPES, KINDS, strict=True))
    return {
        **kinds,
        "all at once": optax.multi_transform(kinds, labels),
        "with rates in the state": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    }


def stepped(optimizer, rank, steps=range(STEPS), params=None, state=None, inside=True):
    """Parameters and state after so many steps, and the updates of each."""
    import jax
    import optax

    params = start() if params is None else params
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update, donate_argnums=1) if inside else optimizer.update
    found = []
    for step in steps:
        updates, state = update(gradients(step, rank), state, params)
        params = optax.apply_updates(params, updates)
        found.append(updates)
    return params, state, found


def assert_equal(ours, theirs):
    import jax

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def assert_close(ours, theirs, tolerance=1e-5):
    """Relative to the largest of an array."""
    import jax

    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        one, other = np.asarray(one, float), np.asarray(other, float)
        least = tolerance * np.abs(other).max(initial=0.0)
        np.testing.assert_allclose(one, other, tolerance, least)


def assert_same_everywhere(tree, kv):
    import jax

    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    assert kv.allgather_object(mine) == [mine] * kv.size()


def elements(tree):
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def as_without(rank, size, kinds):
    import kolovod.jax as kv

    kv.init()
    made = optimizers()
    for kind in kinds:
        plain = kv.DistributedOptimizer(made[kind])
        ours = kv.DistributedOptimizer(made[kind], shard_state=True)
        for inside in (True, False) if kind == "momentum" else (True,):
            wanted, whole, updates = stepped(plain, rank, inside=inside)
            params, state, found = stepped(ours, rank, inside=inside)
            assert_equal(found, updates)
            assert_equal(params, wanted)
            assert_same_everywhere(params, kv)
            gathered = ours.gather_state(state, params)
            assert_equal(gathered, whole)
            assert_equal(plain.gather_state(whole, params), whole)
            cut = ours.cut_state(gathered, params)
            assert_equal(ours.gather_state(cut, params), whole)
            assert elements(state) <= elements(whole) / size + 40
    kv.shutdown()


@pytest.mark.parametrize("size", thorough_but([2], [2, 3]))
def test_as_without_shards(size):
    run_ranks(size, as_without, size, ("all at once",), timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("size", thorough_but([2], [2, 3]))
@pytest.mark.parametrize(
    "kinds",
    [
        ("sgd", "momentum", "adam"),
        ("adamw", "rmsprop"),
        ("lion", "adagrad", "with rates in the state"),
    ],
)
def test_each_optimizer(size, kinds):
    run_ranks(size, as_without, size, kinds, timeout_s=LIMIT_S)


def as_compiled(rank):
    """With LLVM's usual optimizations, apply_updates in the same program, and passes."""
    import jax
    import optax

    import kolovod.jax as kv

    kv.init()
    adamw = optimizers()["adamw"]
    found = []
    for shard_state in (False, True):
        optimizer = kv.DistributedOptimizer(
            adamw, backward_passes_per_step=2, op=kv.Sum, shard_state=shard_state
        )

        @jax.jit
        def step(params, state, grads, update=optimizer.update):
            updates, state = update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = start()
        state = optimizer.init(params)
        for number in range(4):
            params, state = step(params, state, gradients(number, rank))
            if number == 1:  # a part of a sum waits in the state no more
                state = optimizer.cut_state(optimizer.gather_state(state, params), params)
        assert_same_everywhere(params, kv)
        found.append((params, optimizer.gather_state(state, params)))
    assert_close(found[1][0].pop("deep"), found[0][0].pop("deep"), 1e-2)
    assert_close(found[1][0], found[0][0], 1e-6)
    assert jax.tree.structure(found[1][1]) == jax.tree.structure(found[0][1])
    kv.shutdown()


@pytest.mark.slow
def test_as_usually_compiled():
    run_ranks(2, as_compiled, env={"XLA_FLAGS": ""}, timeout_s=LIMIT_S)


def goes_on(rank, given, shard_state, steps):
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    optimizer = kv.DistributedOptimizer(optimizers()["momentum"], shard_state=shard_state)
    params, state = start(), None
    if given is not None:
        params, whole = jax.tree.map(jnp.asarray, pickle.loads(given))
        state = optimizer.cut_state(whole, params)
    # The same gradients on all ranks, so that their number changes nothing.
    params, state, _ = stepped(optimizer, 1, steps, params, state)
    whole = optimizer.gather_state(state, params)
    found = pickle.dumps(jax.tree.map(np.asarray, (params, whole)))
    kv.shutdown()
    return found


@pytest.mark.slow
def test_a_state_goes_on_with_other_numbers_of_ranks():
    wanted = run_ranks(1, goes_on, None, False, range(3), timeout_s=LIMIT_S)[0]
    state = run_ranks(2, goes_on, None, True, range(1), timeout_s=LIMIT_S)[0]
    state = run_ranks(4, goes_on, state, True, range(1, 2), timeout_s=LIMIT_S)[0]
    found = run_ranks(1, goes_on, state, False, range(2, 3), timeout_s=LIMIT_S)[0]
    assert_equal(pickle.loads(found), pickle.loads(wanted))


def clips(rank):
    """By the norm of all parts; of the padding nothing; and as optax where there are no shards."""
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    for max_norm in (0.5, 1e4):
        ours = kv.DistributedOptimizer(
            optax.chain(kv.clip_by_global_norm(max_norm), optax.sgd(0.1)), shard_state=True
        )
        plain = kv.DistributedOptimizer(
            optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(0.1))
        )
        _, _, found = stepped(ours, rank)
        _, _, wanted = stepped(plain, rank)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one.pop("deep"), other.pop("deep"), 2e-2)
            assert_close(one, other)
    # What becomes of zeros behind the last element of a part is none of the norm's.
    params = {"a": jnp.zeros(5), "b": jnp.zeros(())}
    shifted = optax.stateless(lambda updates, params: jax.tree.map(lambda u: u + 1.0, updates))
    clip = kv.clip_by_global_norm(0.1)
    nested = optax.GradientTransformation(clip.init, jax.jit(clip.update))  # and so kept by JAX
    ours = kv.DistributedOptimizer(optax.chain(shifted, nested), shard_state=True)
    updates, _ = ours.update(params, ours.init(params), params)
    np.testing.assert_allclose(updates["a"], 0.1 / 6**0.5, 1e-6)
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray(4.0)}
    for clipping in (kv.clip_by_global_norm(jnp.asarray(1.0)), optax.clip_by_global_norm(1.0)):
        clipped, _ = clipping.update(grads, clipping.init(grads))
        np.testing.assert_allclose(clipped["a"], [0.6, 0.0], 1e-6)
        np.testing.assert_allclose(clipped["b"], 0.8, 1e-6)
    kv.shutdown()


@pytest.mark.slow
def test_clipping_by_the_norm_of_all_parts():
    run_ranks(2, clips, timeout_s=LIMIT_S)


def in_a_process_set(rank):
    import kolovod.jax as kv

    kv.init()
    pair = kv.add_process_set([0, 2])
    momentum = optimizers()["momentum"]
    found = []
    for shard_state in (False, True):
        optimizer = kv.DistributedOptimizer(momentum, process_set=pair, shard_state=shard_state)
        params, state, _ = stepped(optimizer, rank)
        found.append((params, optimizer.gather_state(state, params)))
    assert_equal(found[1], found[0])
    assert elements(state) < elements(found[1][1]) * (0.6 if rank != 1 else 1.1)
    kv.shutdown()


@pytest.mark.slow
def test_among_a_process_set():
    run_ranks(3, in_a_process_set, timeout_s=LIMIT_S)


def mixers():
    import optax

    import kolovod.jax as kv

    return {
        "norm": (optax.chain(optax.clip_by_global_norm(1e9), optax.adam(1e-2)), "mixes elements"),
        "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "mixes elements"),
        "average": (optax.chain(kv.average_gradients(), optax.sgd(0.1)), "communicates itself"),
    }


def refuses_mixers(rank):
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    params = {"a": jnp.ones((30, 30)), "b": jnp.ones(9)}
    for kind, (mixer, text) in mixers().items():
        optimizer = kv.DistributedOptimizer(mixer, shard_state=True)
        try:
            jax.jit(optimizer.update)(params, optimizer.init(params), params)
            said = "nothing"
        except InvalidArgumentError as error:
            said = str(error)
        assert re.search(f"shard_state gives .*({text})", said), (kind, said)
    # What it is given besides is passed on.
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, 1, cooldown=0))
    found = []
    for shard_state in (False, True):
        optimizer = kv.DistributedOptimizer(plateau, shard_state=shard_state)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for value in (1.0, 2.0, 2.0, 2.0):
            updates, state = update(params, state, params, value=value)
        found.append(updates)
    assert_equal(found[1], found[0])
    kv.shutdown()


@pytest.mark.slow
def test_optimizers_that_mix_all_parameters():
    run_ranks(2, refuses_mixers, timeout_s=LIMIT_S)


def refusals(rank):
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv
    from kolovod.core.transaction import use_transaction

    kv.init()
    adam = optax.adam(1e-2)
    for wrong, text in (
        ({"compression": kv.Compression.fp16}, "leave compression at Compression.none"),
        ({"op": kv.Adasum}, "gradients are combined by Average or Sum"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            kv.DistributedOptimizer(adam, shard_state=True, **wrong)
    for max_norm in (0, -1.0, True, "1", jnp.ones(2)):
        with pytest.raises(InvalidArgumentError, match="max_norm is"):
            kv.clip_by_global_norm(max_norm)
    optimizer = kv.DistributedOptimizer(adam, shard_state=True)
    params = {"a": jnp.ones(7), "b": jnp.ones((2, 2))}
    state = optimizer.init(params)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    outline = jax.eval_shape(optimizer.init, params)
    assert jax.tree.structure(outline) == jax.tree.structure(state)
    plain = kv.DistributedOptimizer(adam).init(params)
    other = {"a": jnp.ones(9), "b": jnp.ones((2, 2))}
    for call, text in (
        (lambda: optimizer.update(params, plain, params), "state is a tuple: give what init"),
        (lambda: optimizer.update(params, state._replace(rank=1 - state.rank), params), "rank .'s"),
        (lambda: optimizer.update(other, state, other), "but for these parameters a rank of 2"),
        (lambda: optimizer.update(params, state, other), "of one structure and shapes"),
        (lambda: optimizer.update(params, state, params, grad=params), "grad with an array"),
        (lambda: optimizer.cut_state(state, params), "give what gather_state returned"),
        (lambda: optimizer.cut_state(plain, other), "give what gather_state returned"),
        (lambda: optimizer.init({"n": jnp.ones(2, int)}), r"parameter\['n'\] is of int64"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            call()
    use_transaction(SimpleNamespace(is_elastic=True))
    with pytest.raises(InvalidArgumentError, match="shard_state does not work in elastic jobs"):
        optimizer.init(params)
    use_transaction(None)
    with pytest.raises(MismatchError, match=r"\['a'\]' \(3,\), rank 1 has '\['a'\]' \(4,\)"):
        kv.DistributedOptimizer(adam, shard_state=True).init({"a": jnp.ones(3 + rank)})
    kv.barrier()
    kv.shutdown()


def test_what_is_refused():
    run_ranks(2, refusals, timeout_s=LIMIT_S)

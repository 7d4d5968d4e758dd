"""Sharded transformations of optax that need whole arrays: each array is one rank's."""

from __future__ import annotations

import pickle
import re

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
run_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
LIMIT_S = 150
STEPS = 3
SHAPES = {  # some of one shape, others alone with theirs; what Muon leaves to AdamW, too
    "embedding": ((40, 6), "float32"),
    "a": ((16, 24), "float32"),
    "b": ((24, 24), "float32"),
    "c": ((24, 24), "float32"),
    "d": ((24, 9), "float64"),
    "bias": ((7,), "float32"),
    "scalar": ((), "float32"),
    "deep": ((3, 5, 7), "float32"),
    "none": ((3, 0), "float32"),
}


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


def of_each(change):
    """A transformation that makes ``change(update)`` of each update."""
    import jax
    import optax

    return optax.stateless(lambda updates, params: jax.tree.map(change, updates))


def by_size(tree):
    import jax

    return jax.tree.map(lambda leaf: leaf.size > 300, tree)


def makers():
    import jax
    import jax.numpy as jnp
    import optax

    def muon(**options):
        labels = {name: "muon" if name in "abcd" else "adam" for name in SHAPES}
        kinds = {"muon": optax.contrib.muon(0.02, **options), "adam": optax.adamw(1e-2)}
        return optax.multi_transform(kinds, labels)

    return {
        "muon": optax.contrib.muon(0.02),
        "muon by names": muon(weight_decay=0.1),
        "with rates in the state": optax.inject_hyperparams(optax.contrib.muon)(learning_rate=0.02),
        "adafactor": optax.adafactor(0.02, min_dim_size_to_factor=8),
        "lamb": optax.lamb(1e-2),
        "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
        "order": of_each(lambda u: u[::-1] if u.ndim else u),
        "loop": of_each(lambda u: jax.lax.fori_loop(0, 2, lambda _, v: v - v.sum(), u)),
        "mask": optax.add_decayed_weights(0.1, mask=by_size),
        "rate": of_each(lambda u: u / jnp.sqrt(max(u.size, 1))),
        "condition": of_each(lambda u: jax.lax.cond(u.sum() > 0, jnp.sin, jnp.cos, u)),
    }


def stepped(optimizer, rank, steps=range(STEPS), params=None, state=None, inside=True):
    """Parameters and state after so many steps."""
    import jax
    import optax

    params = start() if params is None else params
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update, donate_argnums=1) if inside else optimizer.update
    for step in steps:
        updates, state = update(gradients(step, rank), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(ours, theirs):
    """To the last bits: XLA computes in another order where the same is in another program."""
    import jax

    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, 2e-5, 2e-6 * np.abs(other).max(initial=0.0))


def assert_same_everywhere(tree, kv):
    import jax

    mine = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    assert kv.allgather_object(mine) == [mine] * kv.size()


def elements(tree):
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def as_without(rank, size, kinds, inside):
    import kolovod.jax as kv

    kv.init()
    for kind in kinds:
        plain = kv.DistributedOptimizer(makers()[kind])
        # Made anew: a step that donates its state takes a random key of the maker's with it.
        ours = kv.DistributedOptimizer(makers()[kind], shard_state=True)
        wanted, whole = stepped(plain, rank, inside=inside)
        params, state = stepped(ours, rank, inside=inside)
        assert_close(params, wanted)
        assert_same_everywhere(params, kv)
        gathered = ours.gather_state(state, params)
        assert_close(gathered, whole)
        assert_close(ours.gather_state(ours.cut_state(gathered, params), params), gathered)
        # The rank with most has at most 4/3 of an equal share, or one matrix, and all have as much;
        # "d" is of another dtype, so all have room for it; a few elements are counts and padding.
        if elements(whole) > 1000:
            most = max(4 / 3 * elements(whole) / size, 24 * 24) + 24 * 9
            assert elements(state) <= most + 60 < elements(whole), kind
        else:
            assert elements(state) <= elements(whole) + 40, kind
    kv.shutdown()


@pytest.mark.parametrize("size", thorough_but([3], [2, 3, 5]))
def test_muon_as_without_shards(size):
    run_ranks(size, as_without, size, ("muon",), True, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("size", thorough_but([2], [2, 3]))
@pytest.mark.parametrize(
    "kinds",
    [
        ("muon by names", "with rates in the state"),
        ("adafactor", "lamb"),
        ("noise", "order", "loop", "mask", "rate", "condition"),
    ],
)
def test_each_kind(size, kinds):
    run_ranks(size, as_without, size, kinds, True, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_outside_of_a_program():
    run_ranks(2, as_without, 2, ("muon",), False, timeout_s=LIMIT_S)


def clips(rank):
    """By the norm of all ranks' parts and wholes; in one program with passes, in two uses of it."""
    import jax
    import optax

    import kolovod.jax as kv

    kv.init()
    ours = optax.chain(kv.clip_by_global_norm(0.5), optax.contrib.muon(0.02))
    theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(0.02))
    found = []
    for tx, shard_state in ((theirs, False), (ours, True)):
        optimizer = kv.DistributedOptimizer(
            tx, backward_passes_per_step=2, op=kv.Sum, shard_state=shard_state
        )
        other = kv.DistributedOptimizer(tx, shard_state=shard_state)

        @jax.jit
        def step(params, state, grads, update=optimizer.update, second=other.update):
            updates, first = update(grads, state[0], params)
            params = optax.apply_updates(params, updates)
            updates, last = second(grads, state[1], params)
            return optax.apply_updates(params, updates), (first, last)

        params = start()
        state = optimizer.init(params), other.init(params)
        for number in range(4):
            params, state = step(params, state, gradients(number, rank))
        assert_same_everywhere(params, kv)
        whole = optimizer.gather_state(state[0], params), other.gather_state(state[1], params)
        found.append((params, jax.tree.leaves(whole)))
    assert_close(found[1], found[0])
    kv.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", thorough_but([3], [2, 3]))
def test_clipping_by_the_norm_of_all(size):
    run_ranks(size, clips, timeout_s=LIMIT_S)


def goes_on(rank, given, shard_state, steps):
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    optimizer = kv.DistributedOptimizer(makers()["muon"], shard_state=shard_state)
    params, state = start(), None
    if given is not None:
        params, whole = jax.tree.map(jnp.asarray, pickle.loads(given))
        state = optimizer.cut_state(whole, params)
    # The same gradients on all ranks, so that their number changes nothing.
    params, state = stepped(optimizer, 1, steps, params, state)
    whole = optimizer.gather_state(state, params)
    found = pickle.dumps(jax.tree.map(np.asarray, (params, whole)))
    kv.shutdown()
    return found


@pytest.mark.slow
def test_a_state_goes_on_with_other_numbers_of_ranks():
    wanted = run_ranks(1, goes_on, None, False, range(4), timeout_s=LIMIT_S)[0]
    state = run_ranks(2, goes_on, None, True, range(1), timeout_s=LIMIT_S)[0]
    state = run_ranks(3, goes_on, state, True, range(1, 2), timeout_s=LIMIT_S)[0]
    state = run_ranks(1, goes_on, state, True, range(2, 3), timeout_s=LIMIT_S)[0]
    found = run_ranks(1, goes_on, state, False, range(3, 4), timeout_s=LIMIT_S)[0]
    assert_close(pickle.loads(found), pickle.loads(wanted))


def in_a_process_set(rank):
    import kolovod.jax as kv

    kv.init()
    pair = kv.add_process_set([1, 2])
    tx = makers()["muon"]
    found = []
    for shard_state in (False, True):
        optimizer = kv.DistributedOptimizer(tx, process_set=pair, shard_state=shard_state)
        params, state = stepped(optimizer, rank)
        found.append((params, optimizer.gather_state(state, params)))
    assert_close(found[1], found[0])
    assert elements(state) < elements(found[1][1]) * (0.7 if rank else 1.1)
    kv.shutdown()


@pytest.mark.slow
def test_among_a_process_set():
    run_ranks(3, in_a_process_set, timeout_s=LIMIT_S)


def refuses(rank, size):
    import jax
    import jax.numpy as jnp
    import optax

    import kolovod.jax as kv

    kv.init()
    params = {"a": jnp.ones((30, 30)), "b": jnp.ones(9)}

    def joined(updates, params):
        mean = sum(leaf.mean() for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda u: u * mean, updates)

    def turned(updates, params):  # one gets what was the other's
        return dict(
            zip(updates, reversed([u.sum() + 0 * u for u in updates.values()]), strict=True)
        )

    of_both = optax.GradientTransformation(
        lambda params: jnp.zeros(()),
        lambda updates, state, params: (
            jax.tree.map(lambda u: u - u.mean() + state, updates),
            state + updates["a"].sum() + updates["b"].sum(),
        ),
    )
    clip, muon = kv.clip_by_global_norm(1.0), optax.contrib.muon(0.1)
    for kind, tx, text in (
        ("joined", optax.stateless(joined), "mixes elements of several parameters"),
        ("turned", optax.stateless(turned), "mixes elements of several parameters"),
        ("in the state", of_both, "mixes elements of several parameters"),
        ("norm", optax.chain(optax.clip_by_global_norm(1.0), muon), "of several parameters"),
        ("twice", optax.chain(clip, muon, clip), "the norm of all gradients more than once"),
        ("average", optax.chain(kv.average_gradients(), muon), "communicates itself"),
    ):
        with pytest.raises(InvalidArgumentError, match="shard_state gives the optimizer") as caught:
            kv.DistributedOptimizer(tx, shard_state=True).init(params)
        said = re.search(
            r"of parts (.*); of one parameter without the others (.*)", str(caught.value)
        )
        assert said, (kind, str(caught.value))
        assert text in said[2], kind
    # What wants more than a state can be made with is refused when it steps, and says so.
    wants = optax.GradientTransformationExtraArgs(
        muon.init, lambda updates, state, params, *, scale: muon.update(updates, state, params)
    )
    optimizer = kv.DistributedOptimizer(wants, shard_state=True)
    state = optimizer.init(params)
    with pytest.raises(InvalidArgumentError, match=r"could not be tried when the state .*'scale'"):
        optimizer.update(params, state, params, scale=1.0)
    if size > 1:
        optimizer = kv.DistributedOptimizer(muon, shard_state=True)
        state = optimizer.init(params)
        for wrong in (state._replace(held=()), state._replace(held=(jnp.ones(3),))):
            with pytest.raises(InvalidArgumentError, match="but for these parameters a rank of 2"):
                optimizer.update(params, wrong, params)
        tx = optax.sgd(0.1) if rank else muon
        with pytest.raises(MismatchError, match="which one rank steps with"):
            kv.DistributedOptimizer(tx, shard_state=True).init(params)
    kv.barrier()
    kv.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_refused(size):
    run_ranks(size, refuses, size, timeout_s=LIMIT_S)


def stays_alone(rank):
    """One process steps as without shards."""
    import kolovod.jax as kv

    kv.init()
    tx = makers()["adafactor"]
    found = [
        stepped(kv.DistributedOptimizer(tx, shard_state=shard_state), rank)
        for shard_state in (False, True)
    ]
    assert_close(found[1][0], found[0][0])
    assert found[1][1].held == ()
    kv.shutdown()


@pytest.mark.slow
def test_one_process():
    run_ranks(1, stays_alone, timeout_s=LIMIT_S)

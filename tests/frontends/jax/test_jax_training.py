"""Training with optax, flax and Equinox: two ranks do what one process would have done."""

from __future__ import annotations

import re

import numpy as np
import pytest
from forked import QUICKLY_COMPILED, ranks_after
from frameworks import is_installed

from kolovod.core.ops import Average, Max, Sum
from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed"),
    pytest.mark.skipif(not is_installed("optax"), reason="optax is not installed"),
    pytest.mark.timeout(170),
]
MODELS = [name for name in ("flax.linen", "equinox") if is_installed(name.split(".")[0])]
run_ranks = ranks_after(
    "optax", *MODELS, "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
LIMIT_S = 150
STEPS, BATCH = 8, 12


def dense_net(rank=0):
    """Parameters of two layers in float64, others on each rank."""
    import jax.numpy as jnp

    draw = np.random.default_rng(rank)
    sizes = ((20, 16), (16, 5))
    return [
        {"w": jnp.asarray(draw.normal(size=s) / 4), "b": jnp.asarray(draw.normal(size=s[1]))}
        for s in sizes
    ]


def dense_loss(params, batch):
    """Cross-entropy of a batch, averaged over it."""
    import jax
    import jax.numpy as jnp

    images, labels = batch
    hidden = jnp.tanh(images @ params[0]["w"] + params[0]["b"])
    scores = jax.nn.log_softmax(hidden @ params[1]["w"] + params[1]["b"])
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


def batches(rank, size, steps=STEPS):
    """The part of this rank in each global batch."""
    draw = np.random.default_rng(1)
    part = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    for _ in range(steps):
        images, labels = draw.normal(size=(BATCH, 20)), draw.integers(5, size=BATCH)
        yield images[part], labels[part]


def train(loss_of, params, optimizer, data, inside=True):
    """The parameters after training, as NumPy arrays."""
    import jax
    import optax

    def step(params, state, batch):
        gradients = jax.grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    if inside:
        step = jax.jit(step, donate_argnums=(0, 1))
    state = optimizer.init(params)
    for batch in data:
        params, state = step(params, state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def assert_same(mine, wanted, kv, tolerance=1e-12):
    """To rounding what one process has, and bitwise the same on all ranks."""
    assert len(mine) == len(wanted)
    for array, right in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(array, right, tolerance, tolerance)
    digests = kv.allgather_object([array.tobytes() for array in mine])
    assert all(digest == digests[0] for digest in digests)


def test_equals_one_process():
    """Momentum, Adam and clipping of the average, inside jax.jit; and outside of it."""

    def work(rank):
        import optax

        import kolovod.jax as kv

        kv.init()
        sgd = optax.sgd(0.05, momentum=0.9)
        clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
        for plain, ours, inside in (
            (sgd, kv.DistributedOptimizer(sgd), True),
            (sgd, kv.DistributedOptimizer(sgd, gradient_predivide_factor=4.0), True),
            (clipped, optax.chain(kv.average_gradients(), clipped), True),
            (sgd, kv.DistributedOptimizer(sgd), False),
        ):
            steps = STEPS if inside else 2
            wanted = train(dense_loss, dense_net(), plain, batches(0, 1, steps))
            params = kv.broadcast_pytree(dense_net(rank))
            mine = train(dense_loss, params, ours, batches(rank, 2, steps), inside)
            assert_same(mine, wanted, kv)
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)


@pytest.mark.slow
def test_passes():
    """Gradients of several calls are summed here, and sent once; MultiSteps averages them."""

    def work(rank):
        import optax

        import kolovod
        import kolovod.jax as kv

        kv.init()

        def operations():
            return kolovod.core.world.current().engine.stats()["operations"]

        sgd = optax.sgd(0.05, momentum=0.9)
        doubled = optax.chain(optax.scale(2.0), sgd)  # a sum of two, where MultiSteps has the mean
        alone = optax.MultiSteps(doubled, 2)
        ours = kv.DistributedOptimizer(sgd, backward_passes_per_step=2)
        for inside, steps in ((False, 4), (True, STEPS)):
            wanted = train(dense_loss, dense_net(), alone, batches(0, 1, steps))
            before = operations()
            mine = train(dense_loss, dense_net(), ours, batches(rank, 2, steps), inside)
            assert operations() - before == 2 * steps / 2  # gradients, and what is compared
            assert_same(mine, wanted, kv, 1e-6)  # MultiSteps adds up in float32
        averaged = optax.MultiSteps(optax.chain(kv.average_gradients(), doubled), 2)
        assert_same(train(dense_loss, dense_net(), averaged, batches(rank, 2)), wanted, kv, 1e-6)
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)


def test_how_gradients_travel():
    """Compression, Sum, process sets, buckets; what is no gradient passes."""

    def work(rank):
        import jax
        import jax.numpy as jnp
        import optax

        import kolovod
        import kolovod.jax as kv

        kv.init()
        tree = {"a": jnp.full(3, 1.0 + rank), "b": [jnp.full((2, 2), 0.1 * (rank + 1)), None]}
        for compression, tolerance in (("none", 0), ("fp16", 1e-3), ("bf16", 1e-2)):
            chosen = getattr(kv.Compression, compression)
            transformation = kv.average_gradients(chosen, Sum)
            for wrap in (lambda f: f, jax.jit):
                summed, _ = wrap(lambda t: transformation.update(t, optax.EmptyState()))(tree)  # noqa: B023
                assert summed["a"].dtype == jnp.float64
                assert summed["a"].tolist() == [3.0] * 3
                np.testing.assert_allclose(summed["b"][0], np.full((2, 2), 0.3), tolerance or 1e-15)
                assert summed["b"][1] is None
        programs = jax.jit(lambda t: kv.allreduce_pytree(t, compression=kv.Compression.bf16))
        assert "bf16" in programs.lower(tree).as_text()
        members = kv.add_process_set([1])
        own = kv.average_gradients(process_set=members)
        kept, _ = jax.jit(lambda t: own.update(t, optax.EmptyState()))(tree)
        assert kept["a"].tolist() == tree["a"].tolist()

        # 12 arrays of 400 KB: two travel together. Then a single one, and one that is no gradient.
        many = [jnp.full(50_000, float(rank + i)) for i in range(12)]
        before = kolovod.core.world.current().engine.stats()["operations"]
        means = jax.jit(kv.allreduce_pytree)(many)
        assert kolovod.core.world.current().engine.stats()["operations"] - before == 6
        assert [float(mean[-1]) for mean in means] == [i + 0.5 for i in range(12)]
        assert jax.jit(kv.allreduce_pytree)(jnp.ones(())).item() == 1
        assert kv.allreduce_pytree({}) == {}
        zero = np.zeros(2, jax.dtypes.float0)
        _, passed = kv.allreduce_pytree((jnp.ones(2), zero))
        assert passed is zero
        twice = jax.jit(lambda t: kv.allreduce_pytree(kv.allreduce_pytree(t, op=Sum), op=Sum))
        assert twice(jnp.ones(3000))[0] == 4

        for leaf, kind in ((0.5, "float"), (jnp.tanh, "function|PjitFunction|jit")):
            with pytest.raises(InvalidArgumentError, match=rf"leaf \['x'\] is a .*({kind})"):
                kv.allreduce_pytree({"a": jnp.ones(2), "x": leaf})
        longer = jnp.ones(3 + rank)
        with pytest.raises(Exception, match=re.escape("rank 0 has (3,), rank 1 has (4,)")):
            jax.block_until_ready(jax.jit(kv.allreduce_pytree)([jnp.ones(2), longer]))
        for wrong, text in (
            ({"op": Max}, "gradients are combined by Average or Sum"),
            ({"op": Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor is 2.0"),
            ({"compression": "fp16"}, "compression is 'fp16'"),
            ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0"),
        ):
            with pytest.raises(InvalidArgumentError, match=text):
                kv.DistributedOptimizer(optax.sgd(1.0), **wrong)
        with pytest.raises(InvalidArgumentError, match="optimizer is a float"):
            kv.DistributedOptimizer(0.1)
        assert kv.average_metrics({"loss": float(rank)}, samples=1 + rank) == {"loss": 2 / 3}
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)


def test_broadcast_pytree():
    """Arrays of both kinds, random keys, numbers, functions; inside jax.jit; and other trees."""

    def work(rank):
        import jax
        import jax.numpy as jnp
        import optax

        import kolovod.jax as kv

        kv.init()
        params = {
            "w": jnp.full((3, 2), rank, jnp.bfloat16),
            "host": np.full(4, rank, np.int16),
            "count": np.full(2, rank + 2**31, np.uint32),
            "key": jax.random.key(rank),
            "rate": 0.5 + rank,
            "name": f"rank {rank}",
            "function": [max, min][rank],
            "nothing": None,
        }
        got = kv.broadcast_pytree(params, 1)
        assert got["w"].dtype == jnp.bfloat16
        assert float(got["w"].sum()) == 6
        assert type(got["host"]) is np.ndarray
        assert got["host"].tolist() == [1] * 4
        assert got["count"].tolist() == [2**31 + 1] * 2
        assert jax.random.key_data(got["key"]).tolist() == [0, 1]
        assert (got["rate"], got["name"]) == (1.5, "rank 1")
        assert got["function"] is params["function"]
        assert got["nothing"] is None
        assert params["host"].tolist() == [rank] * 4

        def state_of(root):
            params, optimizer = dense_net(root), optax.adam(1e-2)
            gradients = jax.tree.map(lambda p: p + 1.0 + root, params)
            return optimizer.update(gradients, optimizer.init(params), params)[1]

        state = kv.broadcast_pytree(state_of(rank))
        for mine, wanted in zip(*map(jax.tree.leaves, (state, state_of(0))), strict=True):
            np.testing.assert_array_equal(mine, wanted)
        some = {"key": jax.random.key(rank), "w": jnp.full(9, rank), "fixed": 7}
        inside = jax.jit(lambda w, key: kv.broadcast_pytree({**some, "w": w, "key": key}, 1))
        got = inside(some["w"], some["key"])
        assert got["w"].tolist() == [1] * 9
        assert jax.random.key_data(got["key"]).tolist() == [0, 1]
        assert got["fixed"] == 7
        alone = kv.add_process_set([1])
        if rank == 1:
            assert kv.broadcast_pytree({"w": np.ones(2)}, 1, process_set=alone)["w"].sum() == 2

        other = {"layers": [jnp.ones(2), jnp.ones(3 + rank)]}
        text = r"leaf 1 differs: rank 0 has '\['layers'\]\[1\]' .*rank 1 has .*\(4,\)"
        with pytest.raises(MismatchError, match=text):
            kv.broadcast_pytree(other)
        with pytest.raises(InvalidArgumentError, match=r"leaf \['z'\] has dtype int4"):
            kv.broadcast_pytree({"z": jnp.ones(2, "int4")})
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("flax"), reason="flax is not installed")
def test_flax():
    """A module's parameters are a pytree as they are."""

    def work(rank):
        import flax.linen as nn
        import jax
        import jax.numpy as jnp
        import optax

        import kolovod.jax as kv

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.LayerNorm(param_dtype=jnp.float64)(x)
                x = nn.relu(nn.Dense(16, param_dtype=jnp.float64)(x))
                return nn.Dense(5, param_dtype=jnp.float64)(x)

        def loss_of(params, batch):
            scores = Net().apply(params, batch[0])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

        def start(seed):
            return jax.jit(Net().init)(jax.random.key(seed), jnp.ones((1, 20)))

        kv.init()
        wanted = train(loss_of, start(0), optax.adam(1e-2), batches(0, 1))
        params = kv.broadcast_pytree(start(rank))
        ours = kv.DistributedOptimizer(optax.adam(1e-2))
        assert_same(train(loss_of, params, ours, batches(rank, 2)), wanted, kv)
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("equinox"), reason="Equinox is not installed")
def test_equinox():
    """A model that is a pytree itself, functions and all."""

    def work(rank):
        import equinox as eqx
        import jax
        import optax

        import kolovod.jax as kv

        def make(seed):
            return eqx.nn.MLP(20, 5, 16, 2, key=jax.random.key(seed))

        def loss_of(model, batch):
            scores = jax.vmap(model)(batch[0])
            return optax.softmax_cross_entropy_with_integer_labels(scores, batch[1]).mean()

        def learn(model, optimizer, data):
            @eqx.filter_jit
            def step(model, state, batch):
                gradients = eqx.filter_grad(loss_of)(model, batch)
                params = eqx.filter(model, eqx.is_inexact_array)
                updates, state = optimizer.update(gradients, state, params)
                return eqx.apply_updates(model, updates), state

            state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            for batch in data:
                model, state = step(model, state, batch)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))]

        kv.init()
        wanted = learn(make(0), optax.adam(1e-2), batches(0, 1))
        model = kv.broadcast_pytree(make(rank))
        assert_same(
            learn(model, kv.DistributedOptimizer(optax.adam(1e-2), op=Average), batches(rank, 2)),
            wanted,
            kv,
        )
        kv.shutdown()

    run_ranks(2, work, timeout_s=LIMIT_S)

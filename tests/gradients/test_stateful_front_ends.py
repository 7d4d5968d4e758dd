"""The stateful compressor of the tests in front ends other than PyTorch (there: its own tests)."""

from __future__ import annotations

import numpy as np
import pytest
from compressors import SignsWithFeedback, expected
from forked import run_jax_ranks, run_tensorflow_ranks
from frameworks import is_installed

from kolovod.errors import InvalidArgumentError

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(170)]
SIZE, STEPS = 2, 3
SHAPES = {"large": (5, 7), "other": (9,), "small": (2,)}


def gradients(step, rank):
    draw = np.random.default_rng(10 * step + rank)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def wanted(name):
    return expected(
        [[gradients(step, rank)[name] for rank in range(SIZE)] for step in range(STEPS)]
    )


def assert_close(found, step):
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted(name)[step], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
def test_jax():
    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        kv.init()
        compressor = SignsWithFeedback(jnp.asarray)
        for step in range(STEPS):
            tree = jax.tree.map(jnp.asarray, gradients(step, rank))
            assert_close(kv.allreduce_pytree(tree, compression=compressor), step)
        assert sorted(compressor.state_dict()) == ["['large']", "['other']"]
        with pytest.raises(InvalidArgumentError, match=r"keeps a state .* but a program of JAX"):
            jax.jit(lambda t: kv.allreduce_pytree(t, compression=compressor))(tree)
        kv.shutdown()

    run_jax_ranks(SIZE, work)


@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
def test_tensorflow():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        compressor = SignsWithFeedback(tf.constant)
        variables = {name: tf.Variable(tf.zeros(shape)) for name, shape in SHAPES.items()}

        def averages(step):
            with kv.DistributedGradientTape(tf.GradientTape(), compressor) as tape:
                terms = [
                    tf.reduce_sum(variables[name] * grad)
                    for name, grad in gradients(step, rank).items()
                ]
                total = tf.add_n(terms)
            return tape.gradient(total, variables)

        for step in range(STEPS):
            assert_close({n: g.numpy() for n, g in averages(step).items()}, step)
        with pytest.raises(InvalidArgumentError, match=r"keeps a state .* but a graph of Tensor"):
            tf.function(averages)(0)
        kv.shutdown()

    run_tensorflow_ranks(SIZE, work)

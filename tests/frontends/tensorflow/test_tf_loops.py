"""Gradients of verbs in loops, loops within loops and branches of these, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

from kolovod.core.ops import Sum

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]

SIZE, OUTER, INNER = 3, 2, 3
DRAW = np.random.default_rng(5)
START = DRAW.normal(size=(SIZE, 4))
WEIGHTS = DRAW.normal(size=(SIZE, OUTER, INNER, 4))
UPSTREAM = DRAW.normal(size=(SIZE, 4))


def by_hand():
    """Each rank's result and gradient, of the ranks' losses together, of ``model`` below."""
    x, taken = START, []
    for i in range(OUTER):
        for j in range(INNER):
            taken.append((WEIGHTS[:, i, j], x))
            x = np.broadcast_to((WEIGHTS[:, i, j] * np.sin(x)).mean(0), x.shape)
        x = x + 1.0
    gradient = UPSTREAM
    for weights, before in taken[::-1]:
        gradient = weights * np.cos(before) * gradient.mean(0)
    return x, gradient


def models(tf, kv, rank):
    """The same in three ways: converted by AutoGraph, by hand, and with a branch."""
    weights = tf.constant(WEIGHTS[rank])

    def step(x, i, j):
        return kv.allreduce(weights[i, j] * tf.sin(x))

    def converted(x):
        for i in tf.range(OUTER):
            for j in tf.range(INNER):
                x = step(x, i, j)
            x += 1.0
        return x

    def by_while(x):
        def outer(i, x):
            def inner(j, x):
                return j + 1, step(x, i, j)

            return i + 1, tf.while_loop(lambda j, _: j < INNER, inner, (0, x))[1] + 1.0

        return tf.while_loop(lambda i, _: i < OUTER, outer, (0, x), maximum_iterations=OUTER)[1]

    def branching(x):
        for i in tf.range(OUTER):
            for j in tf.range(INNER):
                if i == j:
                    x = step(x, i, j)
                else:
                    x = kv.allreduce(step(x, i, j), op=Sum) / SIZE  # the same again
            x += 1.0
        return x

    return converted, by_while, branching


def check_against_numpy(tf, kv, rank):
    """By tapes within the function and around it, and by tf.gradients."""
    value, gradient = (each[rank] for each in by_hand())
    start, upstream = tf.constant(START[rank]), tf.constant(UPSTREAM[rank])

    def taped(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, x, upstream)

    def symbolic(function, x):
        y = function(x)
        return y, tf.gradients(y, x, upstream)[0]

    for model in models(tf, kv, rank):
        for y, found in (
            taped(tf.function(model), start),
            tf.function(lambda x, m=model: taped(m, x))(start),
            tf.function(lambda x, m=model: symbolic(m, x))(start),
        ):
            np.testing.assert_allclose(y, value, rtol=1e-12)
            np.testing.assert_allclose(found, gradient, rtol=1e-12)


def check_every_verb(tf, kv, rank):
    """Each in the inner loop: the sum over ranks of <result, u> is that of <x, gradient>."""

    def rows(x):  # of all ranks' the first, so that the shape stays
        return kv.allgather(x)[: x.shape[0]]

    def scattered(x):
        return kv.allgather(kv.reducescatter(x, op=Sum))

    @tf.function
    def gradient(x, u):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for i in tf.range(2):
                for _ in tf.range(i + 1):
                    y = kv.broadcast(y, 1) + kv.grouped_allreduce([y, y * 2.0])[1]
                    y = 0.5 * y + rows(y) + kv.alltoall(y)[0] + scattered(y)
            loss = tf.reduce_sum(y * u)
        return loss, tape.gradient(loss, x)

    draw = np.random.default_rng(rank)
    x, u = (tf.constant(draw.normal(size=(SIZE, 2))) for _ in range(2))
    loss, found = gradient(x, u)
    left, right = kv.grouped_allreduce([loss, tf.reduce_sum(x * found)], op=Sum)
    np.testing.assert_allclose(left, right, rtol=1e-10)


def check_a_function_of_two_others(tf, kv, rank):
    """Traced once, within the first, it is of use in the second."""

    @tf.function
    def shared(x):
        for _ in tf.range(2):
            x = kv.allreduce(x * (rank + 1.0), op=Sum)
        return x

    def outer(factor):
        @tf.function
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in tf.range(2):
                    y = shared(y * factor)
            return tape.gradient(y, x)

        return run

    total = sum(range(1, SIZE + 1))
    for factor in (1.0, 2.0):
        found = outer(tf.constant(factor))(tf.constant([1.0]))
        # Of the sum of all ranks' results, each of which depends on all ranks' inputs.
        assert found.numpy() == [SIZE * (rank + 1) * total**3 * factor**2]
    assert shared.experimental_get_tracing_count() == 1


@pytest.mark.slow
def test_gradients_in_loops():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_against_numpy(tf, kv, rank)
        check_every_verb(tf, kv, rank)
        check_a_function_of_two_others(tf, kv, rank)

    run_tensorflow_ranks(SIZE, work, timeout_s=200)

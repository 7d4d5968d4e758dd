"""Gradients of TensorFlow's verbs are adjoint to them."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

from kolovod.core.ops import Average, Max, Sum
from kolovod.core.submission import Request
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from kolovod.errors import InvalidArgumentError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def check_adjoint(tf, kv, verb, shape, gradient_of):
    """The sum over ranks of <verb(x), u> is that of <x, gradient>, for random x and u."""
    draw = np.random.default_rng(kv.rank())
    x = tf.constant(draw.normal(size=shape(kv.rank())))
    result = verb(x)
    u = tf.constant(draw.normal(size=result.shape))
    gradient = gradient_of(verb, x, u)
    assert gradient.shape == x.shape
    sides = [tf.reduce_sum(result * u), tf.reduce_sum(x * gradient)]
    left, right = kv.grouped_allreduce(sides, op=Sum)
    np.testing.assert_allclose(left, right, rtol=1e-12)


def test_gradients_are_adjoint():
    """Of each verb, by tapes in and around functions, eager, and of the ops themselves."""

    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv
        from kolovod.tensorflow import graph

        kv.init()
        size = kv.size()

        def taped(verb, x, u):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(verb(x) * u)
            return tape.gradient(loss, x)

        around = lambda verb, x, u: taped(tf.function(verb), x, u)  # noqa: E731
        within = lambda verb, x, u: tf.function(lambda x, u: taped(verb, x, u))(x, u)  # noqa: E731

        @tf.function
        def symbolic(verb, x, u):
            return tf.gradients(tf.reduce_sum(verb(x) * u), x)[0]

        def even(rank):
            return (2 * size, 3)

        def uneven(rank):
            return (2 * rank + 1, 3)

        splits = [(rank + to) % 3 for to in range(size)]  # together at most 6
        verbs = {
            lambda x: kv.allreduce(x, op=Sum, prescale_factor=0.5, postscale_factor=3.0): even,
            lambda x: kv.allreduce(x): even,
            lambda x: kv.broadcast(x, 1): even,
            lambda x: kv.allgather(x): uneven,
            lambda x: kv.grouped_allgather([x, tf.constant([rank])])[0]: uneven,
            lambda x: kv.alltoall(x)[0]: even,
            lambda x: kv.alltoall(x, splits)[0]: lambda rank: (7, 2),
            lambda x: kv.reducescatter(x): lambda rank: (2 * size + 1, 2),
            lambda x: kv.reducescatter(x, None, Sum, 0.5, 3.0): lambda rank: (1, 2),
        }
        for verb, shape in verbs.items():
            for way in (taped, around, within, symbolic):
                check_adjoint(tf, kv, verb, shape, way)
        scales = (0.5, 3.0)
        ops = {
            Request(ALLREDUCE, None, None, Average, *scales): even,
            Request(BROADCAST, root=1): even,
            Request(ALLGATHER): uneven,
            Request(ALLTOALL, splits=tuple(splits)): lambda rank: (7, 2),
            Request(REDUCESCATTER, None, None, Average, *scales): even,
        }
        for request, shape in ops.items():
            made = tf.autograph.experimental.do_not_convert(
                lambda x, request=request: graph.run(request, [x], 0)[0][0]
            )
            op = tf.function(made)
            check_adjoint(tf, kv, op, shape, symbolic)
        second = tf.function(lambda x: taped(lambda x: kv.allreduce(x**3), x, tf.ones_like(x)))
        with tf.GradientTape() as tape:  # of the gradient
            x = tf.constant([2.0 + rank])
            tape.watch(x)
            y = second(x)
        assert tape.gradient(y, x).numpy().tolist() == [6 * (2 + rank)]
        with pytest.raises(InvalidArgumentError, match="op Max has no gradient"):
            taped(lambda x: kv.reducescatter(x, op=Max), tf.ones([2]), 1.0)

    run_tensorflow_ranks(3, work, timeout_s=240)

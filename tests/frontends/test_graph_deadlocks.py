"""Ranks whose graphs of TensorFlow, or programs of JAX, wait for different operations get an error.

Not within a second, as outside of graphs: their threads have to sleep for some seconds first.
"""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from forked import KERAS_RUNNERS, run_jax_ranks, run_tensorflow_ranks
from frameworks import is_installed
from slow import slow_but

import kolovod

pytestmark = pytest.mark.frameworks

LIMIT_S = (
    110.0  # ten seconds are meant, twenty beside tf.data; without the error ranks wait for ever
)
LONGER_S = 12.0  # than the threads have to sleep


def caught(call):
    """What the error of ``call()`` says."""
    with pytest.raises(Exception, match="wait for different operations") as error:
        call()
    return str(error.value)


def tf_function():
    """A step, and an evaluation, that each ask for one operation of that name."""
    import tensorflow as tf

    import kolovod.tensorflow as kv

    def asks(name):
        function = tf.function(lambda x: kv.allreduce(2.0 * x, name=name))
        return lambda: function(tf.ones(3))

    return asks("step"), asks("evaluation")


def tf_session():
    import tensorflow as tf

    import kolovod.tensorflow as kv

    graph = tf.Graph()
    with graph.as_default():
        fetches = [kv.allreduce(tf.ones(3), name=name) for name in ("step", "evaluation")]
    session = tf.compat.v1.Session(graph=graph)
    return tuple(lambda fetch=fetch: session.run(fetch) for fetch in fetches)


def tf_and_eager():
    return tf_function()[0], eager


def jax_jit():
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    def asks(name):
        function = jax.jit(lambda x: kv.allreduce(2.0 * x, name=name))
        return lambda: jax.block_until_ready(function(jnp.ones(3)))

    return asks("step"), asks("evaluation")


def jax_and_eager():
    return jax_jit()[0], eager


def eager():
    kolovod.allreduce(np.ones(3), name="evaluation")


KINDS = {
    tf_function: ("tensorflow", run_tensorflow_ranks),
    tf_session: ("tensorflow", run_tensorflow_ranks),
    tf_and_eager: ("tensorflow", run_tensorflow_ranks),
    jax_jit: ("jax", run_jax_ranks),
    jax_and_eager: ("jax", run_jax_ranks),
}


def one_step_more(rank, kind):
    kolovod.init()
    step, evaluation = kind()
    for _ in range(3):
        step()
    if rank == 0:
        return caught(step)
    return caught(evaluation)


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("kind", slow_but((tf_function, jax_and_eager), KINDS))
def test_one_step_more(kind):
    framework, run_ranks = KINDS[kind]
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    for text in run_ranks(2, one_step_more, kind, timeout_s=LIMIT_S):
        assert "rank 0 in allreduce 'step' at test_graph_deadlocks.py:" in text
        assert "rank 1 in allreduce 'evaluation' at test_graph_deadlocks.py:" in text


def one_batch_more(rank):
    import keras

    import kolovod.keras as kv

    kv.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(kv.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    batches = 4 + (rank == 0)
    x, y = np.ones((8 * batches, 4), np.float32), np.ones((8 * batches, 1), np.float32)

    def train():
        model.fit(x, y, batch_size=8, verbose=0)
        kv.allreduce(np.ones(1), name="metric")

    return caught(train)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_one_batch_more_in_fit(backend):
    if not (is_installed("keras") and is_installed(backend)):
        pytest.skip(f"Keras with {backend} is not installed")
    for text in KERAS_RUNNERS[backend](3, one_batch_more, timeout_s=LIMIT_S):
        # The other two, or the one of them that has come to rest.
        assert re.search(r"ranks? [12, ]+ in allreduce 'metric' at test_graph_deadlocks.py:", text)
        assert "rank 0 in allreduce" in text


# What goes on after a while -----------------------------------------------------------------------


def crossed_callbacks(rank):
    """Each rank waits in one branch for what the other rank's callback holds up."""
    import tensorflow as tf

    import kolovod.tensorflow as kv

    kv.init()

    def slow(x):
        time.sleep(LONGER_S)
        return x

    @tf.function
    def step(x):
        late = tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), (3,))
        a = kv.allreduce(x if rank == 0 else late, name="a")
        return a + kv.allreduce(x if rank == 1 else late, name="b")

    return step(tf.ones(3)).numpy().tolist()


def late_in_python(rank):
    import jax
    import jax.numpy as jnp

    import kolovod.jax as kv

    kv.init()
    step = jax.jit(lambda x: kv.allreduce(x, name="step") + kv.allreduce(x, name="more"))
    if rank == 1:
        time.sleep(LONGER_S)
    return step(jnp.ones(3)).tolist()


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
def test_callbacks_in_graphs_may_go_on():
    assert run_tensorflow_ranks(2, crossed_callbacks) == [[2.0] * 3] * 2


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
def test_a_rank_may_be_late():
    assert run_jax_ranks(2, late_in_python) == [[2.0] * 3] * 2

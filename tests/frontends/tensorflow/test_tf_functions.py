"""Starting equal: variables and objects of one rank on all; and batches normalised together."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed, keras_variable

from kolovod.errors import InvalidArgumentError, MismatchError

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]

DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "bool", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


def check_broadcast(tf, kv, rank):
    """Every dtype that variables have, those of Keras too; eager and in a graph."""
    for to_graph in (lambda call: call, tf.function):
        variables = [tf.Variable(tf.cast(tf.fill([2, 3], 5 * rank), name)) for name in DTYPES]
        variables += [keras_variable(tf, [rank, rank]), tf.Variable(float(rank))]
        to_graph(lambda: kv.broadcast_variables(variables, 1))()  # noqa: B023
        for variable in variables[: len(DTYPES)]:
            assert (variable.numpy() == tf.cast(tf.fill([2, 3], 5), variable.dtype).numpy()).all()
        assert np.array(variables[-2]).tolist() == [1, 1]
        assert variables[-1].numpy() == 1


def check_model(tf, kv, rank):
    """A model with random seeds in its state, and an optimizer of Keras."""
    tf.keras.utils.set_random_seed(rank)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(3), layers.Dropout(0.5), layers.BatchNormalization()])
    model.build((None, 4))
    optimizer = tf.keras.optimizers.Adam(0.1 * (rank + 1))
    optimizer.build(model.trainable_variables)
    kv.broadcast_variables(model.variables)
    kv.broadcast_variables(optimizer.variables)
    state = [np.array(v).tobytes() for v in (*model.variables, *optimizer.variables)]
    states = kv.allgather_object(state)
    assert states[0] == states[1]
    if hasattr(tf.keras, "Variable"):  # Keras 2 does not count the rate among its variables
        assert float(np.array(optimizer.learning_rate)) == np.float32(0.1)


def check_refusals(tf, kv, rank):
    with pytest.raises(InvalidArgumentError, match=r"variables\[1\] is a float"):
        kv.broadcast_variables([tf.Variable(1.0), 2.0])
    with pytest.raises(InvalidArgumentError, match=r"variables\[0\] .* is string"):
        kv.broadcast_variables([tf.Variable("text")])
    with pytest.raises(MismatchError, match=r"variable 1 differs: rank 0 .*\(2,\).*rank 1 .*\(3,"):
        kv.broadcast_variables([tf.Variable(1.0), tf.Variable(tf.ones([2 + rank]))])
    with pytest.raises(MismatchError, match="rank 1 has none"):
        kv.broadcast_variables([tf.Variable(1.0)] * (2 - rank))
    with pytest.raises(InvalidArgumentError, match=r"root_rank|rank 5"):
        kv.broadcast_variables([tf.Variable(1.0)], 5)
    alone = kv.add_process_set([1])
    if rank == 1:
        variable = tf.Variable(3.0)
        kv.broadcast_variables([variable], 1, alone)
        assert variable.numpy() == 3
    else:
        with pytest.raises(InvalidArgumentError, match="rank 0 is not in"):
            kv.broadcast_variables([tf.Variable(1.0)], 1, alone)
    kv.remove_process_set(alone)


def check_objects(tf, kv, rank):
    assert kv.broadcast_object({"rank": rank}, 1) == {"rank": 1}
    assert kv.broadcast_object_fn(1)(rank) == 1
    assert kv.allgather_object(rank) == [0, 1]


def normalised(tf, kv, layer, rows, weights, mask, to_step, tape):
    """The layer's output and the gradients of input, scale and offset, of ``weights``' loss."""

    def step(x):
        with tape() as recorder:
            recorder.watch(x)
            y = layer(x, training=True, mask=None if mask is None else tf.constant(mask))
            loss = tf.reduce_sum(y * weights)
        return [y, *recorder.gradient(loss, [x, layer.gamma, layer.beta])]

    return [tensor.numpy() for tensor in to_step(step)(tf.constant(rows))]


def check_sync_batch_norm(tf, kv, rank):
    """Ranks with 5 and 2 samples, against one process with 7."""
    rng = np.random.default_rng(1)
    x, weights = rng.normal(size=(2, 7, 3, 5))
    mask = rng.random(size=(7, 3)) > 0.3
    mine = (slice(0, 5), slice(5, 7))[rank]
    for to_step in (lambda step: step, tf.function):
        for masked in (False, True):
            for axis in (-1, 1):
                if masked and axis == 1:
                    continue  # Keras's own mask is of all dimensions but the last
                plain = tf.keras.layers.BatchNormalization(axis, dtype="float64", momentum=0.75)
                synced = kv.SyncBatchNormalization(axis, dtype="float64", momentum=0.75)
                own_mask = mask[mine] if masked else None
                wanted = normalised(
                    tf, kv, plain, x, weights, mask if masked else None, to_step, tf.GradientTape
                )
                found = normalised(
                    tf, kv, synced, x[mine], weights[mine], own_mask, to_step, tf.GradientTape
                )
                close = {
                    "atol": 1e-6 if masked else 1e-12,
                    "rtol": 1e-6 if masked else 1e-12,
                }  # Keras adds 1e-7 to a mask's sum
                np.testing.assert_allclose(found[0], wanted[0][mine], **close)
                np.testing.assert_allclose(found[1], wanted[1][mine], **close)
                for own, whole in zip(found[2:], wanted[2:], strict=True):
                    total = kv.allreduce(tf.constant(own), op=kv.Sum).numpy()
                    np.testing.assert_allclose(total, whole, **close)
                for name in ("moving_mean", "moving_variance"):
                    moved = np.array(getattr(synced, name))
                    np.testing.assert_allclose(moved, np.array(getattr(plain, name)), **close)
                    assert len(set(kv.allgather_object(moved.tobytes()))) == 1
                inferred = synced(x, training=False).numpy()
                np.testing.assert_allclose(inferred, plain(x, training=False).numpy(), **close)


def check_without_samples(tf, kv, rank):
    """A rank may have none; if no rank has any, moving averages stay."""
    layer = kv.SyncBatchNormalization(momentum=0.0)
    rows = np.array([[1.0, 5.0], [3.0, 9.0]], np.float32)[: 2 * rank]
    assert layer(rows, training=True).shape == (2 * rank, 2)
    assert np.array(layer.moving_mean).tolist() == [2, 7]
    assert np.array(layer.moving_variance).tolist() == [1, 4]
    layer(rows[:0], training=True)
    assert np.array(layer.moving_mean).tolist() == [2, 7]
    layer.trainable = False
    layer(rows * 0 + 5, training=True)
    assert np.array(layer.moving_mean).tolist() == [2, 7]


def check_traced_without_samples(tf, kv, rank):
    """The same where the graph knows that there are none, so that TensorFlow prunes what it can."""
    layer = kv.SyncBatchNormalization(momentum=0.0)
    layer.build([None, 2])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) ** 3)
        return tape.gradient(loss, [x, layer.gamma, layer.beta])

    rows = tf.constant([[1.0, 5.0], [3.0, 8.0], [5.0, 2.0]][: 3 * rank], shape=[3 * rank, 2])
    for _ in range(2):
        of_x, of_gamma, of_beta = step(rows)
        kv.barrier()
    assert np.array(layer.moving_mean).tolist() == [3, 5]
    assert of_x.shape == (3 * rank, 2)
    if rank == 1:
        assert np.abs(of_beta).max() > 0
        return
    assert of_gamma.numpy().tolist() == of_beta.numpy().tolist() == [0, 0]


def check_layer(tf, kv, rank):
    """It is one of Keras: saved and read again, fused into no other, and for some ranks only."""
    model = tf.keras.Sequential([tf.keras.Input((2,)), kv.SyncBatchNormalization(name="sync")])
    again = tf.keras.models.model_from_json(model.to_json())
    assert type(again.get_layer("sync")) is kv.SyncBatchNormalization
    alone = kv.add_process_set([0])
    layer = kv.SyncBatchNormalization(momentum=0.0, process_set=alone)
    for _ in range(1 + rank):  # as often as each likes
        layer(tf.fill([2, 2], float(rank)), training=True)
    assert np.array(layer.moving_mean).tolist() == [rank, rank]
    kv.remove_process_set(alone)


def check_python_in_graphs(tf, rank):
    """Whose code TensorFlow writes into a file with another name in each process."""
    import kolovod.numpy as kv

    @tf.function
    def total(tensor):
        def summed(value):
            return kv.allreduce(np.asarray(value), op=kv.Sum)

        first = tf.numpy_function(summed, [tensor], tf.float32)
        return first + tf.py_function(summed, [tensor], tf.float32)

    assert total(tf.constant([rank + 1.0])).numpy().tolist() == [6.0]


def test_starting_equal_and_normalising_together():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        check_broadcast(tf, kv, rank)
        check_model(tf, kv, rank)
        check_refusals(tf, kv, rank)
        check_objects(tf, kv, rank)
        check_sync_batch_norm(tf, kv, rank)
        check_without_samples(tf, kv, rank)
        check_traced_without_samples(tf, kv, rank)
        check_layer(tf, kv, rank)
        check_python_in_graphs(tf, rank)

    run_tensorflow_ranks(2, work, timeout_s=150)

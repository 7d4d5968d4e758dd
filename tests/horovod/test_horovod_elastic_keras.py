"""Horovod's elastic states and callbacks for TensorFlow and Keras, among two ranks."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from forked import KERAS_2, KERAS_RUNNERS, run_tensorflow_ranks
from frameworks import is_installed

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]


def trained(keras, rank):
    """A model and what it was compiled with: Adam, whose state is not zero after a step."""
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    model.set_weights([np.full(w.shape, float(rank)) for w in model.get_weights()])
    return model


def fit(model, rank, **options):
    inputs = np.arange(24.0).reshape(8, 3) + rank
    model.fit(inputs, inputs[:, :2], batch_size=2, verbose=0, **options)


def values_of(model, hvd):
    """Of all that training changes."""
    from kolovod.keras.functions import optimizer_variables

    variables = [*model.weights, *optimizer_variables(model.optimizer, model)]
    return [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in variables]


def same(left, right):
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def check_keras_state(keras, hvd, rank):
    model = trained(keras, rank)
    state = hvd.elastic.KerasState(model, epoch=rank, seen=[])
    start = values_of(model, hvd)
    fit(model, rank)
    assert not same(values_of(model, hvd), start)
    state.epoch = 5
    state.restore()
    assert same(values_of(model, hvd), start)  # the state of Adam was built, and is as it was
    assert state.epoch == rank
    state.sync()
    assert state.epoch == 0
    first = values_of(model, hvd)
    assert same(first[:2], [np.zeros((3, 2)), np.zeros(2)])
    fit(model, 0)
    state.seen.append("a")
    state.commit()
    kept = values_of(model, hvd)
    places = [copy.ctypes.data for copy in state._kept_variables.copies.values()]
    for _ in range(2):
        fit(model, 0)
        state.seen.append("b")
        state.restore()
        assert same(values_of(model, hvd), kept)
        assert state.seen == ["a"]
    state.save()
    assert [copy.ctypes.data for copy in state._kept_variables.copies.values()] == places
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"has no variables yet: call model\.build"):
        hvd.elastic.KerasState(unbuilt)


def check_callbacks(keras, hvd, rank):
    model = trained(keras, rank)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    seen = []
    state.commit = lambda: seen.append((state.epoch, state.batch))
    steps = []

    class Watching(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            steps.append(follows_batch.params["steps"])

    follows_batch = hvd.elastic.UpdateBatchStateCallback(state)
    callbacks = [
        follows_batch,
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        Watching(),
    ]
    fit(model, rank, epochs=2, callbacks=callbacks)  # of four batches
    assert seen == [(0, 2), (1, 0), (1, 2), (2, 0)]  # also at the end of each epoch
    assert (state.epoch, state.batch) == (2, 0)
    assert steps == [4, 4]
    del seen[:], steps[:]
    state.batch = 1  # as after a commit in the middle of an epoch
    fit(model, rank, epochs=3, callbacks=callbacks)
    assert steps == [3, 4, 4]
    assert state.epoch == 5
    assert seen == [(2, 2), (3, 0), (3, 2), (4, 0), (4, 2), (5, 0)]


def check_callbacks_of_ones_own(keras, hvd, rank):
    """What a script overrides is called, and goes on by ``super()``."""
    model = trained(keras, rank)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    seen = []
    state.commit = lambda: seen.append("commit")

    class Telling(hvd.elastic.CommitStateCallback):
        def on_batch_end(self, batch, logs=None):
            seen.append(f"batch {batch}")
            super().on_batch_end(batch, logs)

        def commit(self):
            seen.append("asked")
            super().commit()

    class Numbering(hvd.elastic.UpdateBatchStateCallback):
        def on_batch_end(self, batch, logs=None):
            super().on_batch_end(batch, logs)
            seen.append(f"state {state.batch}")

    fit(model, rank, callbacks=[Telling(state, batches_per_commit=3), Numbering(state)])
    due = ["asked", "commit"]
    assert seen == [
        "batch 0", "state 0", "batch 1", "state 1", "batch 2", *due, "state 2", "batch 3",
        "state 3", *due,
    ]  # fmt: skip


def check_commits_by_the_epoch(keras, hvd, rank):
    """Where no epoch has as many batches as a commit wants."""
    model = trained(keras, rank)
    state = hvd.elastic.KerasState(model, epoch=0)
    commits = {1: 0, 100: 0}
    for every in commits:

        def commit(every=every):
            commits[every] += 1

        state.commit = commit
        fit(model, rank, epochs=3, callbacks=[hvd.elastic.CommitStateCallback(state, every)])
    assert commits == {1: 3 * (4 + 1), 100: 3}


def check_commits_within_fit(keras, hvd, rank):
    """What has been learned by then is kept, and restored after an error that has left ``fit``."""
    model = trained(keras, 0)
    state = hvd.elastic.KerasState(model)
    start, kept = values_of(model, hvd), []

    class Watches(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            kept.append([np.copy(copy) for copy in state._kept_variables.copies.values()])
            if batch == 2:
                raise KeyError

    commits = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    with pytest.raises(KeyError):
        fit(model, 0, shuffle=False, callbacks=[commits, Watches()])
    state.restore()
    assert same(values_of(model, hvd), kept[1])
    assert same(kept[1], kept[2])
    assert not same(kept[1], start)
    fit(model, 0, shuffle=False)
    assert not same(values_of(model, hvd), kept[1])


@pytest.mark.parametrize("which", ["tensorflow", "torch", "jax", "tf_keras"])
def test_keras(which):
    if which == "tf_keras" and not is_installed(KERAS_2):
        pytest.skip("there is no Keras 2")
    if which in ("torch", "jax") and (not is_installed(which) or KERAS_2 == "keras"):
        pytest.skip(f"there is no Keras on {which}")

    def work(rank):
        keras = importlib.import_module(KERAS_2 if which == "tf_keras" else "keras")
        name = "horovod.keras" if which in ("torch", "jax") else "horovod.tensorflow.keras"
        hvd = importlib.import_module(name)
        hvd.init()
        check_keras_state(keras, hvd, rank)
        check_callbacks(keras, hvd, rank)
        check_callbacks_of_ones_own(keras, hvd, rank)
        check_commits_by_the_epoch(keras, hvd, rank)
        check_commits_within_fit(keras, hvd, rank)
        return True

    assert all(KERAS_RUNNERS[which](2, work, timeout_s=200))


def check_tensorflow_state(tf, hvd, rank):
    variables = [tf.Variable([1.0 + rank, 2.0]), tf.Variable(3, dtype=tf.int64)]
    state = hvd.elastic.TensorFlowState(variables, batch=rank)
    variables[0].assign([9.0, 9.0])
    state.restore()
    assert variables[0].numpy().tolist() == [1.0 + rank, 2.0]
    state.sync()
    assert variables[0].numpy().tolist() == [1.0, 2.0]
    assert state.batch == 0
    variables[1].assign(4)
    state.commit()
    variables[1].assign(5)
    state.restore()
    assert variables[1].numpy() == 4
    with pytest.raises(ValueError, match="variables is empty"):
        hvd.elastic.TensorFlowState([])


def check_session(tf, hvd, rank):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=[1.0 + rank, 2.0])
        session.run(tf.compat.v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(batch=rank)
        state.sync()
        assert session.run(variable).tolist() == [1.0, 2.0]
        operations = len(tf.compat.v1.get_default_graph().get_operations())
        variable.load([7.0, 7.0], session)
        state.restore()
        assert session.run(variable).tolist() == [1.0, 2.0]
        state.sync()
        state.commit()
        assert len(tf.compat.v1.get_default_graph().get_operations()) == operations
    with tf.Graph().as_default():
        unused = tf.compat.v1.get_variable("v", initializer=1.0)
        with pytest.raises(ValueError, match="session is None"):
            hvd.elastic.TensorFlowState([unused])


def check_errors(tf, hvd):
    """What a graph says of a lost world has the function entered again, other errors end it."""
    from horovod.common.exceptions import HorovodInternalError

    class State:
        def __init__(self):
            self.calls = []
            self.sync = lambda: self.calls.append("sync")
            self.restore = lambda: self.calls.append("restore")
            self.on_reset = lambda: self.calls.append("on_reset")

    again = [
        tf.errors.AbortedError(None, None, "rank 1 died"),
        tf.errors.UnknownError(None, None, "HorovodAllreduce_x failed"),
        HorovodInternalError("an eager one"),
    ]
    for error in again:
        errors, state = [error], State()

        def work(state, errors=errors):
            for one in [errors.pop() for _ in errors]:
                raise one
            return hvd.size()

        assert hvd.elastic.run(work)(state) == 2
        assert state.calls == ["sync", "restore", "on_reset", "sync"]
    for error in (
        tf.errors.UnknownError(None, None, "disk"),
        tf.errors.NotFoundError(None, None, ""),
    ):

        def fail(state, error=error):
            raise error

        with pytest.raises(type(error)):
            hvd.elastic.run(fail)(State())


def test_tensorflow():
    def work(rank):
        import tensorflow as tf

        import horovod.tensorflow as hvd

        hvd.init()
        check_tensorflow_state(tf, hvd, rank)
        check_session(tf, hvd, rank)
        check_errors(tf, hvd)
        return True

    assert all(run_tensorflow_ranks(2, work, timeout_s=200))

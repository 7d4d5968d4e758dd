"""Horovod's names for Keras: signatures, defaults, errors, and a script as its users write it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import numpy as np
import pytest
from forked import KERAS_2, KERAS_RUNNERS, run_keras_ranks
from frameworks import is_installed, keras_variable
from slow import slow_but

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not is_installed("keras"), reason="Keras is not installed"),
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(300),
]

COMMON = (
    "optimizer, name=None, device_dense='', device_sparse='', compression=none, "
    "sparse_as_dense=False, gradient_predivide_factor=1.0, op=0"
)
REDUCED = "prescale_factor=1.0, postscale_factor=1.0, op=None, compression=none"
SCHEDULE = "momentum_correction=True, steps_per_epoch=None"
SAME = {
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=none, "
    "legacy_opts=False",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "callbacks.MetricAverageCallback": "device=''",
    "callbacks.LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, "
    f"end_epoch=None, staircase=True, {SCHEDULE}",
    "callbacks.LearningRateWarmupCallback": f"initial_lr, warmup_epochs=5, {SCHEDULE}, verbose=0",
    "init": "comm=None, process_sets=None",
    "ProcessSet": "ranks_or_comm",
}
SIGNATURES = {
    "horovod.keras": SAME
    | {
        "DistributedOptimizer": f"{COMMON}, num_groups=0, groups=None",
        "PartialDistributedOptimizer": f"{COMMON}, backward_passes_per_step=1, "
        "average_aggregated_gradients=False, groups=None, process_set=GPS, local_layers=None, "
        "scale_local_gradients=True",
        "allreduce": f"value, name=None, average=True, {REDUCED}",
        "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, mode='auto', "
        "save_freq='epoch'",
    },
    "horovod.tensorflow.keras": SAME
    | {
        "DistributedOptimizer": f"{COMMON}, backward_passes_per_step=1, "
        "average_aggregated_gradients=False, num_groups=0, groups=None, process_set=GPS, "
        "scale_local_gradients=True",
        "allreduce": f"value, name=None, average=None, {REDUCED}",
        "callbacks.BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, "
        "mode='auto', save_freq='epoch'",
    },
}
BASICS = (
    "shutdown is_initialized rank size local_rank local_size cross_rank cross_size start_timeline "
    "stop_timeline mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built "
    "ddl_built ccl_built cuda_built rocm_built Average Sum Compression global_process_set "
    "add_process_set remove_process_set"
)


def written(function):
    """The parameters as the table writes them."""
    from horovod.common.process_sets import global_process_set
    from kolovod.keras import Compression

    named = {id(Compression.none): "none", id(global_process_set): "GPS"}
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={named.get(id(p.default), repr(p.default))}"
        for p in inspect.signature(function).parameters.values()
    )


def check_surface():
    for module, signatures in SIGNATURES.items():
        hvd = importlib.import_module(module)
        for name, wanted in signatures.items():
            found = hvd
            for part in name.split("."):
                found = getattr(found, part)
            assert written(found) == wanted, (module, name)
        missing = [name for name in (*BASICS.split(), *hvd.__all__) if not hasattr(hvd, name)]
        assert missing == []
        assert written(hvd.elastic.KerasState) == "model, optimizer=None, kwargs"
        assert written(hvd.elastic.CommitStateCallback) == "state, batches_per_commit=1"
        assert written(hvd.elastic.UpdateBatchStateCallback) == "state"
        assert written(hvd.elastic.UpdateEpochStateCallback) == "state"
        assert written(hvd.elastic.run) == "func"


def check_values(rank):
    import horovod.keras as hvd
    import horovod.tensorflow.keras as tf_hvd

    assert hvd.allreduce(rank + 1.0) == tf_hvd.allreduce(rank + 1.0) == 1.5
    assert hvd.allreduce(rank + 1.0, average=None, op=hvd.Sum) == 3
    assert tf_hvd.allreduce(rank + 1.0, op=hvd.Sum) == 3
    assert tf_hvd.allreduce(rank + 1.0, None, None, 2.0, 3.0, hvd.Sum, hvd.Compression.fp16) == 18
    with pytest.raises(ValueError, match="give op only"):
        hvd.allreduce(1.0, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert tf_hvd.allreduce(rank + 1.0, average=False) == 3
    assert hvd.allgather([rank]).numpy().tolist() == [0, 1]
    assert hvd.broadcast([rank], 1, "b").numpy().tolist() == [1]
    assert hvd.reducescatter([1.0, 2.0], op=hvd.Sum).numpy().tolist() == [2.0 * (rank + 1)]
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


def calls(hvd, value):
    """Each verb, by name."""
    return {
        "allreduce": hvd.allreduce(value),
        "allgather": hvd.allgather(value),
        "broadcast": hvd.broadcast(value, 1),
        "reducescatter": hvd.reducescatter(value),
    }


def check_tensors(rank):
    """What comes back is TensorFlow's, also within a function; in TensorFlow 1's graph an array."""
    import tensorflow as tf

    values = np.array([1.0, 2.0]) + rank
    expected = {
        "allreduce": [1.5, 2.5],
        "allgather": [1.0, 2.0, 2.0, 3.0],
        "broadcast": [2.0, 3.0],
        "reducescatter": [1.5 + rank],
    }
    for name in SIGNATURES:
        hvd = importlib.import_module(name)
        for given in (values, tf.constant(values), tf.Variable(values), keras_variable(tf, values)):
            for verb, found in calls(hvd, given).items():
                assert isinstance(found, tf.Tensor)
                assert found.dtype == tf.convert_to_tensor(given).dtype
                assert found.numpy().tolist() == expected[verb]
        for verb, found in tf.function(lambda hvd=hvd: calls(hvd, tf.constant(values)))().items():
            assert found.numpy().tolist() == expected[verb]
        with tf.Graph().as_default():
            for verb, found in calls(hvd, values).items():
                assert isinstance(found, np.ndarray)
                assert found.tolist() == expected[verb]
        assert hvd.allreduce(1.5).dtype == tf.float32  # as TensorFlow takes a plain number
        with pytest.raises(ValueError, match="string is not supported"):
            hvd.allreduce("1.5")


def check_arguments(keras, rank):
    import horovod.keras as hvd
    import horovod.tensorflow.keras as tf_hvd

    def sgd():
        return keras.optimizers.SGD(0.1)

    wrong = (
        (hvd.DistributedOptimizer, {"op": hvd.Adasum}, "op is 2"),
        (tf_hvd.DistributedOptimizer, {"op": 3}, "op is 3"),
        (hvd.DistributedOptimizer, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "factor"),
        (hvd.PartialDistributedOptimizer, {"local_layers": [3]}, "give layers of Keras"),
        (tf_hvd.DistributedOptimizer, {"process_set": "all"}, "process_set is 'all'"),
        (tf_hvd.DistributedOptimizer, {"groups": "two"}, "groups is 'two'"),
    )
    for function, options, text in wrong:
        with pytest.raises(ValueError, match=text):
            function(sgd(), **options)
    for function in (hvd.DistributedOptimizer, tf_hvd.DistributedOptimizer):
        with pytest.warns(DeprecationWarning, match="num_groups"):
            assert function(sgd(), num_groups=2)._kolovod_reducer.groups.is_number
    for options in ({}, {"scale_local_gradients": False}):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.layers.Input((1,)), layer])
        optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=layer, **options)
        model.compile(optimizer, lambda true, out: out, run_eagerly=True)
        model.fit(np.array([[rank + 1.0]]), np.zeros((1, 1)), verbose=0)
        share = 1.0 if options else 0.5
        np.testing.assert_allclose(layer.get_weights()[0], -0.1 * share * (rank + 1), rtol=1e-6)
    members = hvd.add_process_set([0, 1][:1])
    optimizer = tf_hvd.DistributedOptimizer(sgd(), process_set=members, backward_passes_per_step=2)
    assert KERAS_2 == "keras" or optimizer.gradient_accumulation_steps == 2
    assert optimizer._kolovod_reducer.spec.process_set is members
    hvd.remove_process_set(members)


def check_script(keras, rank, folder):
    """As the examples of Horovod's users are written."""
    import horovod.tensorflow.keras as hvd

    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = f"{folder}/best{rank}.keras"
    seen = {}

    class Last(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.update(logs)

    draw = np.random.default_rng(rank)
    inputs = draw.normal(size=(32, 4))
    model.fit(
        inputs,
        inputs.sum(axis=1, keepdims=True),
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier=0.5, start_epoch=2),
            Last(),
            best,
        ],
    )
    weights = hvd.allgather(model.get_weights()[0].reshape(1, -1)).numpy()
    assert (weights[0] == weights[1]).all()
    assert seen["lr"] == pytest.approx(0.1)
    losses = hvd.allgather([seen["loss"]])
    assert losses[0] == losses[1]
    assert [path.name for path in Path(folder).glob("*")] == ["best0.keras"]
    again = hvd.load_model(f"{folder}/best0.keras", compression=hvd.Compression.fp16)
    assert again.optimizer._kolovod_reducer.spec.compressor.given is hvd.Compression.fp16


@pytest.mark.slow
def test_names_and_a_script(tmp_path):
    def work(rank):
        import keras

        import horovod.keras as hvd

        hvd.init()
        check_surface()
        check_values(rank)
        check_tensors(rank)
        check_arguments(keras, rank)
        check_script(keras, rank, str(tmp_path))
        hvd.shutdown()
        return True

    assert all(run_keras_ranks(2, work, timeout_s=100))


@pytest.mark.parametrize("which", slow_but(("torch",), ("torch", "jax")))
def test_tensors_of_what_keras_runs_on(which):
    if not is_installed(which) or KERAS_2 == "keras":
        pytest.skip(f"{which} is not installed, or Keras is Keras 2, which runs on TensorFlow only")

    def work(rank):
        import keras

        for name in SIGNATURES:
            hvd = importlib.import_module(name)
            hvd.init()
            given = keras.ops.convert_to_tensor(np.array([1.0, 2.0]) + rank)
            for verb, found in calls(hvd, given).items():
                assert keras.ops.is_tensor(found), verb
                assert found.dtype == given.dtype
            assert np.asarray(hvd.allgather(given)).tolist() == [1.0, 2.0, 2.0, 3.0]
        return True

    assert all(KERAS_RUNNERS[which](2, work))

"""Before init() Horovod's names say what scripts and other projects' tests look for."""

from __future__ import annotations

import functools
import importlib

import pytest
from forked import run_keras_ranks, run_tensorflow_ranks, run_torch_ranks
from frameworks import is_installed

import kolovod
from horovod.common.exceptions import HorovodInternalError

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120)]

WORDS = "Horovod has not been initialized"
FACTS = (
    "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "mpi_enabled",
    "gloo_enabled", "mpi_threads_supported", "stop_timeline",
)  # fmt: skip


def facts(hvd):
    return [getattr(hvd, name) for name in FACTS] + [lambda: hvd.start_timeline("unused")]


def of_torch():
    import torch

    import horovod.torch as hvd

    one = torch.ones(2, requires_grad=True)
    verbs = (hvd.allreduce, hvd.allreduce_async, hvd.allgather, hvd.alltoall, hvd.reducescatter)
    return [
        *facts(hvd),
        *(functools.partial(verb, one) for verb in verbs),
        lambda: hvd.grouped_allreduce_([one.detach()]),
        lambda: hvd.broadcast_(one.detach(), 0),
        hvd.barrier,
        hvd.join,
        lambda: hvd.allgather_object(3),
        lambda: hvd.broadcast_parameters({"one": one}, 0),
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([one], 0.1), 0),
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([one], 0.1)),
        lambda: hvd.SyncBatchNorm(2)(torch.ones(3, 2)),
        lambda: hvd.add_process_set([0]),
    ]


def of_tensorflow():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    one = tf.Variable([1.0])

    def gradient():
        with tf.GradientTape() as tape:
            loss = one * one
        return hvd.DistributedGradientTape(tape).gradient(loss, one)

    return [
        *facts(hvd),
        hvd.is_homogeneous,
        hvd.rank_op,
        hvd.size_op,
        lambda: hvd.process_set_included_op(0),
        lambda: hvd.allreduce(one),
        lambda: hvd.grouped_allgather([one, one]),
        lambda: hvd.broadcast(one, 0),
        lambda: hvd.alltoall(one),
        hvd.join,
        lambda: hvd.broadcast_object(3),
        lambda: hvd.broadcast_variables([one], 0),
        gradient,
    ]


def of_keras(name):
    import keras

    hvd = importlib.import_module(name)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])

    def fit(callback):
        model.compile("sgd", "mse")
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": 1.0})

    return [
        *facts(hvd),
        lambda: hvd.allreduce(1.0),
        lambda: hvd.allgather([1.0]),
        lambda: hvd.broadcast(1.0, 0),
        lambda: hvd.reducescatter([1.0]),
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda: fit(hvd.callbacks.BroadcastGlobalVariablesCallback(0)),
        lambda: fit(hvd.callbacks.MetricAverageCallback()),
    ]


MODULES = {
    "horovod.torch": ("torch", run_torch_ranks, of_torch),
    "horovod.tensorflow": ("tensorflow", run_tensorflow_ranks, of_tensorflow),
    "horovod.keras": ("keras", run_keras_ranks, functools.partial(of_keras, "horovod.keras")),
    "horovod.tensorflow.keras": (
        "keras", run_keras_ranks, functools.partial(of_keras, "horovod.tensorflow.keras"),
    ),
}  # fmt: skip


def check_uninitialized(hvd, calls):
    """Before there is a world, and when it is over; also for ``kolovod``'s own names."""
    for _ in range(2):
        for number, call in enumerate(calls):
            with pytest.raises(ValueError, match=WORDS) as caught:
                call()
            assert isinstance(caught.value, HorovodInternalError), number
        with pytest.raises(ValueError, match=r"call init\(\) first") as caught:
            kolovod.rank()
        assert WORDS not in str(caught.value)
        hvd.init()
        assert hvd.rank() == 0
        hvd.shutdown()


@pytest.mark.parametrize("name", MODULES)
def test_before_init(name):
    framework, run_ranks, calls_of = MODULES[name]
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")

    def work(rank):
        hvd = importlib.import_module(name)
        check_uninitialized(hvd, calls_of())
        return True

    assert all(run_ranks(1, work, timeout_s=100))


def in_a_forked_child(rank):
    """The words are there, and what happened, too."""
    import os

    import horovod.torch as hvd

    hvd.init()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hvd.rank()
        except ValueError as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(read_end, 4096).decode()


def test_in_a_forked_child():
    if not is_installed("torch"):
        pytest.skip("PyTorch is not installed")
    (said,) = run_torch_ranks(1, in_a_forked_child)
    assert said.startswith(WORDS)
    assert "was forked from rank 0" in said

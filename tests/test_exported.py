"""The public surface is what __all__ says: nothing is exported by accident or lost."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest
from forked import run_jax_ranks, run_mxnet_ranks, run_tensorflow_ranks
from frameworks import is_installed

pytestmark = pytest.mark.frameworks

VERBS = {
    *("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"),
    *("grouped_allreduce", "grouped_allreduce_"),
    *("grouped_allreduce_async", "grouped_allreduce_async_"),
    *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
    *("allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"),
    *("alltoall", "alltoall_async", "reducescatter", "reducescatter_async"),
    *("grouped_reducescatter", "grouped_reducescatter_async"),
    *("barrier", "join", "poll", "synchronize"),
    *("broadcast_object", "allgather_object"),
}
WORLD = {
    *("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"),
    *("cross_rank", "cross_size", "Adasum", "Average", "Sum", "Min", "Max", "Product"),
    *("Op", "Handle", "span", "start_timeline", "stop_timeline"),
    *("start_metrics_server", "stop_metrics_server"),
    *("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
}
TRANSFERS = {"send", "recv", "isend", "irecv"}  # between two ranks: NumPy and PyTorch
METRICS = {"average_metrics", "gather_samples"}
OF_TORCH = {
    *("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state", "Compression"),
    *("DiLoCo", "GradBucket", "LocalSGD", "PowerSGD"),
    *("SyncBatchNorm", "Compressor", "Payload", "TorchCollectives", "TorchFrontend", "collectives"),
    *METRICS,
}
OF_JAX = {
    *("JaxCollectives", "JaxFrontend", "Compression", "Compressor", "Payload", "collectives"),
    *("allreduce_pytree", "broadcast_pytree", "average_gradients", "DistributedOptimizer"),
    *("AccumulatedState", "DiLoCoState", "LocalSGDState", "LocalTraining", "diloco", "local_sgd"),
    *("ShardedState", "clip_by_global_norm"),
    *METRICS,
}
FURTHER_PARAMETERS = {("kolovod.jax", "barrier"): ["after"]}  # for its place inside jax.jit
OF_MXNET = {
    *("DistributedTrainer", "DistributedOptimizer", "broadcast_parameters", "Kolovod"),
    *("Compression", "Compressor", "Payload", "MxnetCollectives", "MxnetFrontend", "collectives"),
}
_NO_VERBS_IN_PLACE = {verb for verb in VERBS if not verb.endswith("_")}
SURFACE = {
    "kolovod": VERBS
    | WORLD
    | TRANSFERS
    | {"__version__", "errors", "last_operations", "run", "Progress", "RankFailed", "SshOptions"}
    | {"broadcast_parameters", "Compression"},
    "kolovod.metrics": METRICS | {"Metrics"},
    "kolovod.numpy": VERBS
    | WORLD
    | TRANSFERS
    | {"Array", "NumpyFrontend", "broadcast_parameters", "collectives"},
    "kolovod.torch": VERBS | WORLD | TRANSFERS | OF_TORCH,
    "kolovod.tensorflow": VERBS
    | WORLD
    | {"TensorflowCollectives", "TensorflowFrontend", "collectives"}
    | {"DistributedGradientTape", "DistributedOptimizer", "Compression", "Compressor", "Payload"}
    | {"SyncBatchNormalization", "broadcast_variables", "broadcast_object_fn"}
    | {"rank_op", "size_op", "local_rank_op", "local_size_op", "cross_rank_op", "cross_size_op"}
    | {"process_set_included_op"},
    "kolovod.mxnet": VERBS | WORLD | OF_MXNET,
    "kolovod.jax": _NO_VERBS_IN_PLACE | WORLD | OF_JAX,
}

# Not in this process: they leave threads behind, in the way of tests that fork.
_RUNNERS = {"tensorflow": run_tensorflow_ranks, "jax": run_jax_ranks, "mxnet": run_mxnet_ranks}


def check_surface(name, rank=0):
    module = import_module(name)
    assert set(module.__all__) == SURFACE[name]
    for exported in module.__all__:
        value = getattr(module, exported)
        if inspect.isroutine(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name}.{exported} has no docstring"
    for verb in VERBS & SURFACE[name]:
        names = [
            list(inspect.signature(getattr(m, verb)).parameters)
            for m in (import_module("kolovod"), module)
        ]
        assert names[0] + FURTHER_PARAMETERS.get((name, verb), []) == names[1], (
            f"{name}.{verb} has other parameters"
        )


@pytest.mark.parametrize("name", SURFACE)
def test_surface(name):
    framework = name.partition(".")[2]
    run = _RUNNERS.get(framework)
    if (run or framework == "torch") and not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    if run:
        run(1, partial(check_surface, name))
    else:
        check_surface(name)


def test_what_somebody_has_put_in_the_place_of_a_name_stays() -> None:
    """Names are loaded at the first use of one of them: not over those that a script has set."""
    code = "import kolovod\nkolovod.shutdown = len\nkolovod.init\nassert kolovod.shutdown is len"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_all_names_are_there_before_one_is_used() -> None:
    code = "import kolovod\nassert set(kolovod.__all__) <= set(dir(kolovod))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

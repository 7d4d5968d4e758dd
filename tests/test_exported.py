"""The public surface is what __all__ says: nothing is exported by accident or lost."""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module

import pytest
from forked import run_jax_ranks, run_tensorflow_ranks
from frameworks import is_installed

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
    *("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
}
METRICS = {"average_metrics", "gather_samples"}
OF_TORCH = {
    *("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state", "Compression"),
    *("SyncBatchNorm", "Compressor", "TorchCollectives", "TorchFrontend", "collectives"),
    *METRICS,
}
_NO_VERBS_IN_PLACE = {verb for verb in VERBS if not verb.endswith("_")}
SURFACE = {
    "kolovod": VERBS
    | WORLD
    | {"__version__", "errors", "last_operations", "run", "RankFailed", "SshOptions"},
    "kolovod.metrics": METRICS | {"Metrics"},
    "kolovod.numpy": VERBS | {"Array", "NumpyFrontend", "collectives"},
    "kolovod.torch": VERBS | WORLD | OF_TORCH,
    "kolovod.tensorflow": VERBS
    | WORLD
    | {"TensorflowCollectives", "TensorflowFrontend", "collectives"},
    "kolovod.jax": _NO_VERBS_IN_PLACE | WORLD | {"JaxCollectives", "JaxFrontend", "collectives"},
}


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
        assert names[0] == names[1], f"{name}.{verb} has other parameters"


@pytest.mark.parametrize("name", SURFACE)
def test_surface(name):
    framework = name.partition(".")[2]
    if framework in ("torch", "tensorflow", "jax") and not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    if framework in ("tensorflow", "jax"):
        # Not here: they leave threads behind, in the way of tests that fork.
        run = {"tensorflow": run_tensorflow_ranks, "jax": run_jax_ranks}[framework]
        run(1, partial(check_surface, name))
    else:
        check_surface(name)

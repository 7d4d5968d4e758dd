"""The public surface is what __all__ says: nothing is exported by accident or lost."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

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
    *("Op", "Handle"),
    *("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
}
OF_TORCH = {
    *("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state", "Compression"),
    *("Compressor", "TorchCollectives", "TorchFrontend", "collectives"),
}
SURFACE = {
    "kolovod": VERBS | WORLD | {"__version__", "errors", "last_operations"},
    "kolovod.numpy": VERBS | {"Array", "NumpyFrontend", "collectives"},
    "kolovod.torch": VERBS | WORLD | OF_TORCH,
}


@pytest.mark.parametrize("name", SURFACE)
def test_surface(name):
    if name == "kolovod.torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    module = import_module(name)
    assert set(module.__all__) == SURFACE[name]
    for exported in module.__all__:
        value = getattr(module, exported)
        if inspect.isroutine(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name}.{exported} has no docstring"


def test_verbs_have_the_same_signatures_everywhere():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    on_arrays, on_tensors = import_module("kolovod"), import_module("kolovod.torch")
    for verb in VERBS:
        names = [
            list(inspect.signature(getattr(m, verb)).parameters) for m in (on_arrays, on_tensors)
        ]
        assert names[0] == names[1]

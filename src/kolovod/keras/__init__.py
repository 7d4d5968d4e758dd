"""Kolovod for Keras 3, on TensorFlow, PyTorch or JAX, and for Keras 2 (tf_keras).

import kolovod.keras as kv

kv.init()
model.compile(optimizer=kv.DistributedOptimizer(keras.optimizers.SGD(0.01 * kv.size())), ...)
model.fit(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("keras"):
    raise _error

from kolovod.core.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.core.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.core.rank_info import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.core.spans import span
from kolovod.core.world import is_initialized
from kolovod.gradients.compression import Compression, Compressor
from kolovod.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_model,
    broadcast_variables,
    reducescatter,
)
from kolovod.keras.optimizer import DistributedOptimizer
from kolovod.keras.saving import load_model
from kolovod.lifecycle import init, shutdown
from kolovod.metrics import average_metrics
from kolovod.numpy import allgather_object, barrier, broadcast_object, join
from kolovod.observe.timeline import start_timeline, stop_timeline

if TYPE_CHECKING:
    from kolovod.keras import callbacks

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_model",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "span",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """``callbacks``, when they are asked for: they belong to one Keras, which they import."""
    if name == "callbacks":
        import importlib

        return importlib.import_module("kolovod.keras.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

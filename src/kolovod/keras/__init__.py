"""Kolovod for Keras 3, on TensorFlow, PyTorch or JAX, and for Keras 2 (tf_keras).

import kolovod.keras as kv

kv.init()
model.compile(optimizer=kv.DistributedOptimizer(keras.optimizers.SGD(0.01 * kv.size())), ...)
model.fit(...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kolovod.extras import missing as _missing

if _error := _missing("keras"):
    raise _error

from kolovod.compression import Compression, Compressor
from kolovod.facts import cross_rank, cross_size, local_rank, local_size, rank, size
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
from kolovod.metrics import average_metrics
from kolovod.numpy import allgather_object, barrier, broadcast_object, join
from kolovod.observe.spans import span
from kolovod.observe.timeline import start_timeline, stop_timeline
from kolovod.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.world import init, is_initialized, shutdown

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

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

from kolovod.core.world import when_entered as _when_entered
from kolovod.gradients.compression import Compression, Compressor, Payload
from kolovod.keras.elastic import share_in_elastic_jobs as _share_in_elastic_jobs
from kolovod.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_model,
    broadcast_variables,
    reducescatter,
)
from kolovod.keras.optimizer import DistributedOptimizer
from kolovod.keras.optimizer import watch_copies as _watch_copies
from kolovod.keras.saving import load_model
from kolovod.metrics import average_metrics
from kolovod.numpy import barrier, join
from kolovod.surface import world as _world
from kolovod.surface.world import *

if TYPE_CHECKING:
    from kolovod.keras import callbacks

_share_in_elastic_jobs()
_watch_copies()
_when_entered(_watch_copies)

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Payload",
    "allgather",
    "allreduce",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_model",
    "broadcast_variables",
    "callbacks",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += _world.__all__


def __getattr__(name: str) -> Any:
    """``callbacks``, when they are asked for: they belong to one Keras, which they import."""
    if name == "callbacks":
        import importlib

        return importlib.import_module("kolovod.keras.callbacks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

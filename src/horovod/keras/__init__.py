"""Horovod's interface for Keras: ``import horovod.keras as hvd``."""

from __future__ import annotations

from typing import Any

from horovod.common import surface as _surface
from horovod.common.surface import *
from horovod.keras import callbacks, elastic
from horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from horovod.keras.values import (
    allgather,
    broadcast,
    broadcast_global_variables,
    reduced,
    reducescatter,
)
from kolovod.keras import Compression

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += _surface.__all__


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine ``value`` over all ranks; a tensor.

    Horovod's default of ``average`` makes an error of ``op`` alone: give ``average=None`` with it.
    """
    if op is None and average is True:
        average = None  # it is the default, not a deprecated word of the caller
    return reduced(value, name, average, prescale_factor, postscale_factor, op, compression)

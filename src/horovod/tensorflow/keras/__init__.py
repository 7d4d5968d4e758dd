"""Horovod's interface for tf.keras: ``import horovod.tensorflow.keras as hvd``."""

from __future__ import annotations

from typing import Any

from horovod.common import surface as _surface
from horovod.common.arguments import groups_of
from horovod.common.surface import *
from horovod.keras.optimizer import PartialDistributedOptimizer as _distributed
from horovod.keras.optimizer import load_model
from horovod.keras.values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    reducescatter,
)
from horovod.tensorflow.keras import callbacks, elastic
from kolovod.keras import Compression

__all__ = [
    "Compression",
    "DistributedOptimizer",
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


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer distributed; see horovod.keras.DistributedOptimizer and kolovod.keras.

    Raises ValueError likewise. ``register_local_var(variable)`` of the optimizer that it returns
    leaves a variable to each rank.
    """
    return _distributed(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups_of(num_groups, groups),
        process_set,
        None,
        scale_local_gradients,
    )

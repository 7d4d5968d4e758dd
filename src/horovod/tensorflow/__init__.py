"""Horovod's TensorFlow interface: ``import horovod.tensorflow as hvd``."""

from __future__ import annotations

from typing import Any as _Any

import horovod as _horovod  # says so if the real one is installed, too
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("tensorflow"):
    raise _error

from horovod.common.util import gpu_available
from horovod.tensorflow import mpi_ops as _mpi_ops
from horovod.tensorflow.arguments import (
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
)
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import *
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.session import BroadcastGlobalVariablesHook, broadcast_global_variables
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from horovod.tensorflow.util import refs_to_vars, vars_to_refs

__version__ = _horovod.__version__


def __getattr__(name: str) -> _Any:
    """Import, when they are asked for, the names that need Keras."""
    if name == "SyncBatchNormalization":
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        import importlib

        return importlib.import_module("horovod.tensorflow.elastic")
    raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")


__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "refs_to_vars",
    "vars_to_refs",
]
__all__ += _mpi_ops.__all__

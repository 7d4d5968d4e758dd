"""Horovod's TensorFlow interface: ``import horovod.tensorflow as hvd``."""

from __future__ import annotations

from typing import Any as _Any

import horovod as _horovod  # says so if the real one is installed, too
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("tensorflow"):
    raise _error

from horovod.common.util import gpu_available
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
    refs_to_vars,
    vars_to_refs,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.optimizer import DistributedOptimizer
from horovod.tensorflow.session import BroadcastGlobalVariablesHook, broadcast_global_variables
from horovod.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__version__ = _horovod.__version__


def __getattr__(name: str) -> _Any:
    """What imports Keras, when it is asked for; and of what is missing, that it is."""
    if name == "SyncBatchNormalization":
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        raise AttributeError(_horovod.NO_ELASTIC)
    raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")


__all__ = [
    "Adasum", "Average", "BroadcastGlobalVariablesHook", "Compression",
    "DistributedGradientTape", "DistributedOptimizer", "LocalGradientAggregationHelper", "Max",
    "Min", "PartialDistributedGradientTape", "ProcessSet", "Product", "Sum",
    "SyncBatchNormalization", "add_process_set", "allgather", "allgather_object", "allreduce",
    "alltoall", "broadcast", "broadcast_", "broadcast_global_variables", "broadcast_object",
    "broadcast_object_fn", "broadcast_variables", "ccl_built", "check_num_rank_power_of_2",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built",
    "gloo_enabled", "gpu_available", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "handle_average_backwards_compatibility", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_rank_op", "local_size", "local_size_op",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "process_set_included_op", "rank", "rank_op", "reducescatter", "refs_to_vars",
    "remove_process_set", "rocm_built", "shutdown", "size", "size_op", "start_timeline",
    "stop_timeline", "vars_to_refs",
]  # fmt: skip

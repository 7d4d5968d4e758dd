"""Horovod's verbs on TensorFlow's tensors, and what a graph can ask for when it is run."""

from __future__ import annotations

import kolovod.tensorflow as kv
from horovod.common.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.common.uninitialized import through_horovod
from horovod.tensorflow.functions import broadcast_
from horovod.tensorflow.moves import allgather, alltoall, broadcast, grouped_allgather, join
from horovod.tensorflow.reductions import (
    _allreduce,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "Adasum", "Average", "Max", "Min", "ProcessSet", "Product", "Sum", "_allreduce",
    "add_process_set", "allgather", "allreduce", "alltoall", "broadcast", "broadcast_",
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set",
    "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "init", "is_homogeneous", "is_initialized", "join", "local_rank",
    "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "process_set_included_op", "rank", "rank_op",
    "reducescatter", "remove_process_set", "rocm_built", "shutdown", "size", "size_op",
    "start_timeline", "stop_timeline",
]  # fmt: skip

rank_op = through_horovod(kv.rank_op)
size_op = through_horovod(kv.size_op)
local_rank_op = through_horovod(kv.local_rank_op)
local_size_op = through_horovod(kv.local_size_op)
process_set_included_op = through_horovod(kv.process_set_included_op)

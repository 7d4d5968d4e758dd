"""Horovod's verbs on PyTorch tensors. Handles are numbers (horovod.torch.handles)."""

from __future__ import annotations

from typing import Any

from horovod.common import basics
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
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    remove_process_set,
)
from horovod.torch import handles
from horovod.torch.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    plain,
)
from horovod.torch.handles import poll, synchronize
from horovod.torch.moves import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)

__all__ = [
    "Adasum", "Average", "HorovodAllgather", "HorovodAllreduce", "HorovodAlltoall",
    "HorovodBroadcast", "HorovodGroupedAllgather", "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter", "HorovodReducescatter", "Max", "Min", "ProcessSet", "Product",
    "Sum", "add_process_set", "allgather", "allgather_async", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built",
    "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip


def init(comm: Any = None, process_sets: Any = None) -> None:
    """See horovod.common.basics.init; numbers of handles begin at 1 with each world."""
    if not is_initialized():
        handles.forget()
    basics.init(comm, process_sets)


def shutdown() -> None:
    """Leave the world; what is pending fails, and its handles are forgotten."""
    basics.shutdown()
    handles.forget()


def barrier(process_set: Any = global_process_set) -> None:
    """Return once every rank of the set has called it.

    Barriers have a name, as Horovod's have: ranks that have made unequally many unnamed calls (one
    failed at once, say) meet in it all the same.
    """
    plain.barrier("barrier.barrier", group_of(process_set))


def join(device: int = -1) -> int:
    """No more data on this rank: contribute zeros until all have joined; who was last.

    ``device`` is where Horovod keeps the zeros, and is of no use here.
    """
    return plain.join()

"""Horovod's verbs on PyTorch tensors. Handles are numbers (horovod.torch.handles)."""

from __future__ import annotations

from typing import Any

from horovod.common import basics
from horovod.common import surface as _surface
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import group_of
from horovod.common.surface import *
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
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _surface.__all__


def init(comm: Any = None, process_sets: Any = None) -> None:  # type: ignore[no-redef]
    """Form a world, see horovod.common.basics.init; handles are numbered from 1 in each world."""
    if not is_initialized():
        handles.forget()
    basics.init(comm, process_sets)


def shutdown() -> None:  # type: ignore[no-redef]
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
    """Contribute zeros, without data, until all ranks have joined; return who was last.

    ``device`` is where Horovod keeps the zeros, and is of no use here.
    """
    return plain.join()

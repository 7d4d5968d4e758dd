"""Data-parallel training: processes that keep their copies of a model equal.

Start ``kolovod run -np 4 python train.py``, and in the script::

    import kolovod

    kolovod.init()
    mean = kolovod.allreduce(array)  # the average over all ranks, on every rank

This module works on NumPy arrays; ``kolovod.torch``, ``tensorflow``, ``keras``, ``jax`` and
``mxnet`` on those of the frameworks. Without the launcher a script runs as the only rank of a world
of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kolovod import errors
from kolovod.core.handles import Handle
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
from kolovod.lifecycle import init, shutdown
from kolovod.numpy import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_parameters,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    irecv,
    isend,
    join,
    poll,
    recv,
    reducescatter,
    reducescatter_async,
    send,
    synchronize,
)
from kolovod.observe.last_operations import last_operations
from kolovod.observe.timeline import start_timeline, stop_timeline
from kolovod.version import __version__

if TYPE_CHECKING:
    from kolovod.launch.run import RankFailed, SshOptions, run

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "RankFailed",
    "SshOptions",
    "Sum",
    "__version__",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "errors",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "join",
    "last_operations",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "send",
    "shutdown",
    "size",
    "span",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """``run`` and what belongs to it, when it is asked for: a rank starts no job."""
    if name in ("RankFailed", "SshOptions", "run"):
        from kolovod.launch import run as launching

        return getattr(launching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

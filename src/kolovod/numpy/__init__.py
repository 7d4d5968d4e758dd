"""Kolovod on NumPy arrays, the reference for all front ends; ``kolovod`` itself re-exports it.

    import kolovod.numpy as kv

    kv.init()
    kv.broadcast_parameters(weights)  # a dict of arrays
    gradient = kv.allreduce(gradient, name="gradient")

docs/numpy.md says what arrays may be like.
"""

from __future__ import annotations

from kolovod.core.collectives import Collectives
from kolovod.core.handles import Handle
from kolovod.core.numpy_frontend import Array, NumpyFrontend
from kolovod.core.objects import Objects
from kolovod.core.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.core.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.core.rank_info import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.core.spans import span
from kolovod.core.transfers import Transfers
from kolovod.core.world import current, is_initialized
from kolovod.lifecycle import init, shutdown
from kolovod.numpy.functions import Functions
from kolovod.observe.timeline import start_timeline, stop_timeline

collectives: Collectives = Collectives(NumpyFrontend(), current)
_objects = Objects(collectives.world)
_functions = Functions(collectives)
_transfers = Transfers(collectives.frontend, collectives.world)

allreduce = collectives.allreduce
allreduce_async = collectives.allreduce_async
allreduce_ = collectives.allreduce_
allreduce_async_ = collectives.allreduce_async_
grouped_allreduce = collectives.grouped_allreduce
grouped_allreduce_async = collectives.grouped_allreduce_async
grouped_allreduce_ = collectives.grouped_allreduce_
grouped_allreduce_async_ = collectives.grouped_allreduce_async_
broadcast = collectives.broadcast
broadcast_async = collectives.broadcast_async
broadcast_ = collectives.broadcast_
broadcast_async_ = collectives.broadcast_async_
allgather = collectives.allgather
allgather_async = collectives.allgather_async
grouped_allgather = collectives.grouped_allgather
grouped_allgather_async = collectives.grouped_allgather_async
alltoall = collectives.alltoall
alltoall_async = collectives.alltoall_async
reducescatter = collectives.reducescatter
reducescatter_async = collectives.reducescatter_async
grouped_reducescatter = collectives.grouped_reducescatter
grouped_reducescatter_async = collectives.grouped_reducescatter_async
send = _transfers.send
recv = _transfers.recv
isend = _transfers.isend
irecv = _transfers.irecv
barrier = collectives.barrier
join = collectives.join
poll = collectives.poll
synchronize = collectives.synchronize
broadcast_parameters = _functions.broadcast_parameters
broadcast_object = _objects.broadcast_object
allgather_object = _objects.allgather_object

__all__ = [
    "Adasum",
    "Array",
    "Average",
    "Handle",
    "Max",
    "Min",
    "NumpyFrontend",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
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
    "collectives",
    "cross_rank",
    "cross_size",
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
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "send",
    "shutdown",
    "size",
    "span",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

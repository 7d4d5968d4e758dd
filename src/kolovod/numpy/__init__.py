"""The verbs on NumPy arrays; ``kolovod`` itself re-exports them."""

from __future__ import annotations

from kolovod.collectives import Collectives
from kolovod.numpy.frontend import Array, NumpyFrontend
from kolovod.objects import Objects
from kolovod.world import current

collectives: Collectives[Array] = Collectives(NumpyFrontend(), current)
_objects = Objects(collectives)

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
barrier = collectives.barrier
join = collectives.join
poll = collectives.poll
synchronize = collectives.synchronize
broadcast_object = _objects.broadcast_object
allgather_object = _objects.allgather_object

__all__ = [
    "Array",
    "NumpyFrontend",
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
    "collectives",
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
    "synchronize",
]

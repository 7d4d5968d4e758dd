"""The verbs that return their results, as type checkers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kolovod.core.collectives import Collectives

    _verbs = cast(Collectives, None)
    allreduce = _verbs.allreduce
    allreduce_async = _verbs.allreduce_async
    grouped_allreduce = _verbs.grouped_allreduce
    grouped_allreduce_async = _verbs.grouped_allreduce_async
    broadcast = _verbs.broadcast
    broadcast_async = _verbs.broadcast_async
    allgather = _verbs.allgather
    allgather_async = _verbs.allgather_async
    grouped_allgather = _verbs.grouped_allgather
    grouped_allgather_async = _verbs.grouped_allgather_async
    alltoall = _verbs.alltoall
    alltoall_async = _verbs.alltoall_async
    reducescatter = _verbs.reducescatter
    reducescatter_async = _verbs.reducescatter_async
    grouped_reducescatter = _verbs.grouped_reducescatter
    grouped_reducescatter_async = _verbs.grouped_reducescatter_async
    barrier = _verbs.barrier
    join = _verbs.join
    poll = _verbs.poll
    synchronize = _verbs.synchronize
else:
    __all__: list[str] = []

"""The common part of backends that carry a bucket by a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kolovod.core.ops import Op


class OnProcessGroup:
    """Collectives of a process group that is made by the subclass, on flat tensors.

    Those that a group wants in equal parts are a broadcast or a reduction for each rank where the
    parts are not equal. On GPUs ``wait`` has the current stream wait, not the host.
    """

    def __init__(self, rank: int) -> None:
        """``rank``: this rank's number in the group."""
        self._rank = rank
        self._group: Any = None
        self._dist: Any = None
        """The module torch.distributed, when there is a group."""

    def _seen(self, values: Any) -> Any:
        """Return the tensor over ``values``, which are in the arrays of the backend's memory."""
        return values

    def _given(self, tensor: Any) -> Any:
        """Return the array over ``tensor``: the reverse of ``_seen``."""
        return tensor

    def allreduce(self, values: Any, op: Op) -> None:
        """Implement ``Backend.allreduce``."""
        options = self._dist.AllreduceOptions()
        options.reduceOp = self._op(op)
        self._group.allreduce([self._seen(values)], options).wait()

    def broadcast(self, values: Any, root: int) -> None:
        """Implement ``Backend.broadcast``."""
        self._broadcast(self._seen(values), root).wait()

    def _broadcast(self, tensor: Any, root: int) -> Any:
        options = self._dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([tensor], options)

    def allgather(self, values: Any, sizes: Sequence[int]) -> Any:
        """Implement ``Backend.allgather``."""
        mine = self._seen(values)
        result = mine.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            self._group._allgather_base(result, mine).wait()
            return self._given(result)
        parts = result.split(list(sizes))
        parts[self._rank].copy_(mine)
        for work in [self._broadcast(part, r) for r, part in enumerate(parts) if part.numel()]:
            work.wait()
        return self._given(result)

    def alltoall(
        self, values: Any, sent: Sequence[int], received: Sequence[int], total: int
    ) -> Any:
        """Implement ``Backend.alltoall``."""
        mine = self._seen(values)
        result = mine.new_empty(sum(received))
        self._group.alltoall_base(result, mine, list(received), list(sent)).wait()
        return self._given(result)

    def reducescatter(self, values: Any, op: Op, counts: Sequence[int]) -> Any:
        """Implement ``Backend.reducescatter``: each rank is the root for its own part."""
        parts = self._seen(values).split(list(counts))
        works = []
        for root, part in enumerate(parts):
            if part.numel():
                options = self._dist.ReduceOptions()
                options.reduceOp, options.rootRank = self._op(op), root
                works.append(self._group.reduce([part], options))
        for work in works:
            work.wait()
        return self._given(parts[self._rank])

    def _op(self, op: Op) -> Any:
        return getattr(self._dist.ReduceOp, op.name.upper())

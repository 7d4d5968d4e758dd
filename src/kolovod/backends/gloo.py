"""Gloo under our negotiation, through torch.distributed: ``kolovod run --backend gloo``.

The process group is constructed by itself, and never registered: a default process group that the
script makes is none of our business. Gloo's own connections are neither authenticated nor
encrypted: between hosts, use it in networks that you trust.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from kolovod.backends.base import Array, Bytes
from kolovod.backends.host_memory import HostMemory
from kolovod.backends.setup import make_store
from kolovod.core.ops import Op
from kolovod.errors import SettingError
from kolovod.net.addresses import interface_to

if TYPE_CHECKING:
    from kolovod.backends.setup import BackendSetup, Place

# Gloo must not be the one who says that a rank is late: a rank may be stopped for a while.
_PATIENCE = timedelta(days=30)


class GlooBackend:
    """Collectives of a process group of Gloo's.

    The order of additions is Gloo's: it depends on an element's place in the bucket and on the
    number of ranks, so a tensor may be summed differently when it is fused with others.
    """

    def __init__(self, place: Place, meeting: BackendSetup) -> None:
        """Collective: connects every rank with every other one.

        The ranks find each other through ``meeting``, and listen on the interface by which they
        reach the rendezvous server, or on what GLOO_SOCKET_IFNAME names. Raises
        InvalidArgumentError when PyTorch with Gloo is not installed, and what Gloo raises when it
        cannot connect the ranks within the start timeout.
        """
        try:
            import torch
            import torch.distributed
            from torch.distributed import ProcessGroupGloo
        except ImportError as error:
            raise SettingError(
                f"backend 'gloo' needs PyTorch with Gloo ({error}): pip install 'kolovod[torch]'"
            ) from None
        self._torch: Any = torch
        self._dist: Any = torch.distributed
        self.memory = HostMemory()
        self._rank = place.rank
        ops = self._dist.ReduceOp
        self._ops = {Op.Sum: ops.SUM, Op.Min: ops.MIN, Op.Max: ops.MAX, Op.Product: ops.PRODUCT}
        group: Any = ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=place.world.settings.start_timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            options._devices = [group.create_default_device()]
        else:
            address = interface_to(place.world.environment.rendezvous)
            options._devices = [group.create_device(hostname=address)]
        store = make_store(self._dist.Store, meeting)
        self._group = group(store, place.rank, place.size, options)
        self._group._set_default_timeout(_PATIENCE)

    def allreduce(self, values: Array, op: Op) -> None:
        """Implement ``Backend.allreduce``."""
        wide = _widened(values)
        options = self._dist.AllreduceOptions()
        options.reduceOp = self._ops[op]
        self._group.allreduce([self._tensor(wide)], options).wait()
        if wide is not values:
            values[...] = wide

    def broadcast(self, values: Bytes, root: int) -> None:
        """Implement ``Backend.broadcast``."""
        self._broadcast(values, root).wait()

    def _broadcast(self, values: Bytes, root: int) -> Any:
        options = self._dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group.broadcast([self._tensor(values)], options)

    def allgather(self, values: Bytes, sizes: Sequence[int]) -> Bytes:
        """Implement ``Backend.allgather``.

        Gloo's own wants equal sizes; others are a broadcast each.
        """
        result = np.empty(sum(sizes), np.uint8)
        if len(set(sizes)) == 1:
            self._group._allgather_base(self._tensor(result), self._tensor(values)).wait()
            return result
        parts = np.split(result, np.cumsum(sizes)[:-1])
        parts[self._rank][...] = values
        works = [self._broadcast(part, rank) for rank, part in enumerate(parts) if part.size > 0]
        for work in works:
            work.wait()
        return result

    def alltoall(
        self, values: Bytes, sent: Sequence[int], received: Sequence[int], total: int
    ) -> Bytes:
        """Implement ``Backend.alltoall``."""
        result = np.empty(sum(received), np.uint8)
        self._group.alltoall_base(
            self._tensor(result), self._tensor(values), list(received), list(sent)
        ).wait()
        return result

    def reducescatter(self, values: Array, op: Op, counts: Sequence[int]) -> Array:
        """Implement ``Backend.reducescatter``: each rank is the root for its own part."""
        parts = np.split(_widened(values), np.cumsum(counts)[:-1])
        works = []
        for root, part in enumerate(parts):
            if part.size > 0:
                options = self._dist.ReduceOptions()
                options.reduceOp, options.rootRank = self._ops[op], root
                works.append(self._group.reduce([self._tensor(part)], options))
        for work in works:
            work.wait()
        return parts[self._rank].astype(values.dtype, copy=False)

    def close(self, *, is_healthy: bool) -> None:
        """Close the connections: a rank that still waits for this one sees it."""
        self._group = None

    def _tensor(self, values: Array) -> Any:
        return self._torch.from_numpy(values)


def _widened(values: Array) -> Array:
    """Return 16-bit integers, which Gloo cannot add, as 32-bit ones; they may wrap afterwards."""
    return values.astype(np.int32) if values.dtype in (np.int16, np.uint16) else values

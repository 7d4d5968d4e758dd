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

from kolovod.backends.base import Array
from kolovod.backends.host_memory import HostMemory
from kolovod.backends.process_group import OnProcessGroup
from kolovod.backends.setup import make_store
from kolovod.core.ops import Op
from kolovod.errors import SettingError
from kolovod.net.addresses import interface_to

if TYPE_CHECKING:
    from kolovod.backends.setup import BackendSetup, RankGroup

# Gloo must not be the one who says that a rank is late: a rank may be stopped for a while.
_PATIENCE = timedelta(days=30)


class GlooBackend(OnProcessGroup):
    """Collectives of a process group of Gloo's.

    The order of additions is Gloo's: it depends on an element's place in the bucket and on the
    number of ranks, so a tensor may be summed differently when it is fused with others.
    """

    def __init__(self, rank_group: RankGroup, meeting: BackendSetup) -> None:
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
        super().__init__(rank_group.rank)
        self._torch: Any = torch
        self._dist = torch.distributed
        self.memory = HostMemory()
        group: Any = ProcessGroupGloo
        options = group._Options()
        options._timeout = timedelta(seconds=rank_group.world.settings.start_timeout_s)
        if os.environ.get("GLOO_SOCKET_IFNAME"):
            options._devices = [group.create_default_device()]
        else:
            address = interface_to(rank_group.world.environment.rendezvous)
            options._devices = [group.create_device(hostname=address)]
        store = make_store(self._dist.Store, meeting)
        self._group = group(store, rank_group.rank, rank_group.size, options)
        self._group._set_default_timeout(_PATIENCE)

    def _seen(self, values: Array) -> Any:
        return self._torch.from_numpy(values)

    def _given(self, tensor: Any) -> Array:
        return tensor.numpy()  # type: ignore[no-any-return]

    def allreduce(self, values: Array, op: Op) -> None:
        """Implement ``Backend.allreduce``."""
        wide = _widened(values)
        super().allreduce(wide, op)
        if wide is not values:
            values[...] = wide

    def reducescatter(self, values: Array, op: Op, counts: Sequence[int]) -> Array:
        """Implement ``Backend.reducescatter``."""
        part: Array = super().reducescatter(_widened(values), op, counts)
        return part.astype(values.dtype, copy=False)

    def close(self, *, is_healthy: bool) -> None:
        """Close the connections: a rank that still waits for this one sees it."""
        self._group = None


def _widened(values: Array) -> Array:
    """Return 16-bit integers, which Gloo cannot add, as 32-bit ones; they may wrap afterwards."""
    return values.astype(np.int32) if values.dtype in (np.int16, np.uint16) else values

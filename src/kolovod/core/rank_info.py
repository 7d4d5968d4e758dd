"""The place of this process in the world. Each raises NotInitializedError before ``init()``."""

from __future__ import annotations

from kolovod.core.world import current_tracked


def rank() -> int:
    """The number of this process, 0 to ``size() - 1``."""
    return current_tracked().rank


def size() -> int:
    """Return the number of processes."""
    return current_tracked().size


def local_rank() -> int:
    """The number of this process among those on its host."""
    return current_tracked().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return current_tracked().local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have this local rank."""
    return current_tracked().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return current_tracked().cross_size

"""The place of this process in the world. Each raises NotInitializedError before ``init()``."""

from __future__ import annotations

from kolovod.core.world import place


def rank() -> int:
    """The number of this process, 0 to ``size() - 1``."""
    return place().rank


def size() -> int:
    """Return the number of processes."""
    return place().size


def local_rank() -> int:
    """The number of this process among those on its host."""
    return place().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have this local rank."""
    return place().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return place().cross_size

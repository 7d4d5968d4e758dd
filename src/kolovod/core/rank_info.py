"""Where this process is in the world. Each raises NotInitializedError before ``init()``."""

from __future__ import annotations

from kolovod.core.world import current


def rank() -> int:
    """The number of this process, 0 to ``size() - 1``."""
    return current().rank


def size() -> int:
    """How many processes there are."""
    return current().size


def local_rank() -> int:
    """The number of this process among those on its host."""
    return current().local_rank


def local_size() -> int:
    """How many processes there are on this host."""
    return current().local_size


def cross_rank() -> int:
    """The number of this host among the hosts that have this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return current().cross_size

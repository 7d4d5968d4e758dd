"""Which engine a group of ``torch.distributed`` gets, and how the world comes about before."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from kolovod import lifecycle
from kolovod.config import load
from kolovod.core import world as worlds
from kolovod.core.process_sets import Membership
from kolovod.errors import GroupArgumentError
from kolovod.rendezvous.external.torchrun import meet
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["Leave", "engine_for"]

Leave = Callable[[], None]
"""Gives up what was made for a group."""


def engine_for(
    store: Any, rank: int, size: int, ranks: Sequence[int]
) -> tuple[worlds.World | Membership, Leave]:
    """The engine for the group of the job's ``ranks`` (empty: all), as its member ``rank``.

    Every member calls this, and nobody else. The group of all is the world, which is formed if
    there is none yet; others get an engine of their own. Raises what ``kolovod.init`` raises, and
    InvalidArgumentError if torch.distributed and Kolovod do not count the same ranks.
    """
    if not ranks:
        leave = _form_world(store, rank, size)
        return _checked_world(rank, size), leave
    job_rank, job_size = dist.get_rank(), dist.get_world_size()
    if list(ranks) != sorted(ranks):
        raise GroupArgumentError(
            f"new_group({list(ranks)}): kolovod needs ranks in ascending order (sort_ranks=True)"
        )
    if not worlds.is_initialized():
        if size < job_size:
            raise GroupArgumentError(
                f"new_group({list(ranks)}): there is no world of Kolovod that this group could be "
                f"a part of. All {job_size} ranks call kolovod.init() before, or "
                'init_process_group("kolovod")'
            )
        leave = _form_world(store, rank, size)
        return _checked_world(rank, size), leave
    world = _checked_world(job_rank, job_size)
    engine = world.form(ranks)

    def dissolve() -> None:
        if worlds.is_initialized() and worlds.current() is world:
            world.dissolve(engine)

    return Membership(engine, rank, size), dissolve


def _form_world(store: Any, rank: int, size: int) -> Leave:
    """Form the world unless there is one; a world that was there before outlives the group."""
    if worlds.is_initialized():
        return lambda: None
    if lifecycle.has_rank():
        lifecycle.init()
        return _shutdown_of(worlds.current(), lifecycle.shutdown)
    if size == 1:  # whatever a launcher says: this group is the only rank's
        alone = RankEnvironment()
        lifecycle.init_at(alone)
        return _shutdown_of(worlds.current(), lambda: lifecycle.leave(alone))
    found = meet(store, rank, size, load(os.environ).start_timeout_s)
    try:
        lifecycle.init_at(found.environment)
    except BaseException:
        found.close()
        raise

    def shutdown() -> None:
        lifecycle.leave(found.environment)
        found.close()

    return _shutdown_of(worlds.current(), shutdown)


def _shutdown_of(world: worlds.World, shutdown: Leave) -> Leave:
    def leave() -> None:
        if worlds.is_initialized() and worlds.current() is world:
            shutdown()

    return leave


def _checked_world(rank: int, size: int) -> worlds.World:
    world = worlds.current()
    if (world.rank, world.size) != (rank, size):
        raise GroupArgumentError(
            f"torch.distributed says that this is rank {rank} of {size}, but in the world of "
            f"Kolovod it is rank {world.rank} of {world.size}: start the ranks with one launcher, "
            "and give init_process_group the rank and world_size that it set"
        )
    return world

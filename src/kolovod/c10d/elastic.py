"""``torch.distributed`` in elastic jobs: its default group is that of the present world.

A process that comes later has a rank only when it comes to ``elastic.run``, so no launcher can tell
it, and the store at which ranks meet elsewhere dies with its rank 0. Hence in elastic jobs
``init_process_group("kolovod")`` asks Kolovod which rank of how many this is, and when the ranks
have met in another world the default group is destroyed and made anew there, with a store of its
own.

In a job of replicas (``kolovod run --replica-size``) the default group is that of the replica, by
whatever backend the script asks for, and stays so (``replicas``).

PyTorch asks for the store before it asks the backend, so ``install`` puts a function of ours in the
place of ``init_process_group``; all calls but these go to PyTorch's.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["install"]


def install() -> None:
    """Have ``torch.distributed.init_process_group`` ask Kolovod for the rank in elastic jobs."""
    original: Callable[..., Any] = c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # which the original says better
            return original(*args, **kwargs)
        if _asks_for_ranks(given) and (os.environ.get("KOLOVOD_REPLICA") or _is_ours(given)):
            environment = _environment_in_elastic_job()
            if environment is not None:
                kept = {key: value for key, value in given.items() if key not in _OURS}
                if not environment.replica:
                    _default.begin(original, kept)
                    return None
                from kolovod.c10d import replicas

                replicas.begin(original, kept, environment)
                return None
        return original(*args, **kwargs)

    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def _asks_for_ranks(given: dict[str, Any]) -> bool:
    """Return whether the ranks of the group are to be found by what the launcher says."""
    return given.get("store") is None and given.get("init_method") in (None, "env://")


def _is_ours(given: dict[str, Any]) -> bool:
    backend = given.get("backend")
    return isinstance(backend, str) and backend.lower() == "kolovod"


def _environment_in_elastic_job() -> RankEnvironment | None:
    """Return the rank environment of this process; None: the job is not elastic."""
    from kolovod.config import load
    from kolovod.elastic import job_membership
    from kolovod.rendezvous.rank_environment import read_rank_environment

    membership = job_membership.find(read_rank_environment(os.environ), load(os.environ))
    return None if membership is None else membership.environment


class _Default:
    """The default group of this process, if its job is elastic."""

    def __init__(self) -> None:
        """There is none before ``begin``."""
        self._make: Callable[..., Any] | None = None
        self._given: dict[str, Any] = {}
        self._is_due = False

    def begin(self, original: Callable[..., Any], given: dict[str, Any]) -> None:
        """Make it by ``original``, for the first time. ``given``: as in ``replicas.begin``."""
        from kolovod import lifecycle
        from kolovod.c10d import data_parallel, shards
        from kolovod.elastic.each_world import in_each_world

        lifecycle.init()
        is_first = self._make is None
        self._make = original
        self._given = given
        self._form()
        if is_first:
            in_each_world(self.follow)
            data_parallel.register()
            shards.register()

    def follow(self) -> None:
        """Make it anew if it is not of the present world. All ranks call it when they have met.

        Raises CollectiveAbortedError if a rank is lost meanwhile, or rank 0's store not reached.
        """
        from kolovod.c10d import shards
        from kolovod.core.world import current

        if dist.is_initialized():
            group: Any = c10d._get_default_group()
            world = getattr(group, "_world", None)
            shards.made_in(world or current())
            if world is current() or group.name() != "kolovod":
                return
            self._is_due = True
            dist.destroy_process_group()
        if self._is_due:  # else the script has destroyed it
            self._form()
            self._is_due = False

    def _form(self) -> None:
        from kolovod.c10d import data_parallel
        from kolovod.c10d.stores import store_of_world
        from kolovod.core.world import current

        assert self._make is not None
        store = store_of_world(self._given.get("timeout"))
        hook = sys.excepthook
        self._make(**self._given, store=store, rank=current().rank, world_size=current().size)
        # PyTorch has put one in front that writes the rank before each line: that of this world, in
        # front of that of the world before. Our launcher marks lines by slots.
        sys.excepthook = hook
        data_parallel.follow(dist.group.WORLD)


_OURS = ("init_method", "rank", "world_size", "store")
"""The arguments that say where a process is, which the script cannot know."""
_default = _Default()

"""``torch.distributed`` in elastic jobs: its default group is that of the present world.

A process that comes later has a rank only when it comes to ``elastic.run``, so no launcher can tell
it, and the store at which ranks meet elsewhere dies with its rank 0. Hence in elastic jobs
``init_process_group("kolovod")`` asks Kolovod which rank of how many this is, and when the ranks
have met in another world the default group is destroyed and made anew there, with a store of its
own.

PyTorch asks for the store before it asks the backend, so ``install`` puts a function of ours in the
place of ``init_process_group``; all calls but these go to PyTorch's.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

__all__ = ["install"]

_REACH_S = 5.0
"""How long the store of a world is looked for, whose address rank 0 has just told."""


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
        if not (_asks_for_ranks(given) and _is_elastic()):
            return original(*args, **kwargs)
        _default.begin(original, given)
        return None

    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group


def _asks_for_ranks(given: dict[str, Any]) -> bool:
    """Whether the ranks of a group of ours are to be found by what the launcher says."""
    backend, url = given.get("backend"), given.get("init_method")
    is_ours = isinstance(backend, str) and backend.lower() == "kolovod"
    return is_ours and given.get("store") is None and url in (None, "env://")


def _is_elastic() -> bool:
    from kolovod.config import load
    from kolovod.elastic import entries
    from kolovod.rendezvous.rank_environment import read_rank_environment

    return entries.find(read_rank_environment(os.environ), load(os.environ)) is not None


class _Default:
    """The default group of this process, if its job is elastic."""

    def __init__(self) -> None:
        """There is none before ``begin``."""
        self._make: Callable[..., Any] | None = None
        self._given: dict[str, Any] = {}
        self._is_due = False

    def begin(self, original: Callable[..., Any], given: dict[str, Any]) -> None:
        """Make it by ``original``, for the first time. ``given``: the script's arguments."""
        from kolovod import lifecycle
        from kolovod.c10d import data_parallel, shards
        from kolovod.elastic.each_world import in_each_world

        lifecycle.init()
        is_first = self._make is None
        self._make = original
        self._given = {key: value for key, value in given.items() if key not in _OURS}
        self._form()
        if is_first:
            in_each_world(self.follow)
            data_parallel.register()
            shards.register()

    def follow(self) -> None:
        """Make it anew if it is not of the present world. All ranks call it when they have met.

        Raises CollectiveAbortedError if a rank is lost meanwhile, or rank 0's store not reached.
        """
        from kolovod.core.world import current

        if dist.is_initialized():
            group: Any = c10d._get_default_group()
            if getattr(group, "_world", None) is current() or group.name() != "kolovod":
                return
            self._is_due = True
            dist.destroy_process_group()
        if self._is_due:  # else the script has destroyed it
            self._form()
            self._is_due = False

    def _form(self) -> None:
        from kolovod.c10d import data_parallel
        from kolovod.core.world import current

        assert self._make is not None
        store = _store_of_world(self._given.get("timeout"))
        hook = sys.excepthook
        self._make(**self._given, store=store, rank=current().rank, world_size=current().size)
        # PyTorch has put one in front that writes the rank before each line: that of this world, in
        # front of that of the world before. Our launcher marks lines by slots.
        sys.excepthook = hook
        data_parallel.follow(dist.group.WORLD)


_OURS = ("init_method", "rank", "world_size", "store")
_default = _Default()


def _store_of_world(timeout: timedelta | None) -> Store:
    """A store for the ranks of the present world, at rank 0; they all call this.

    Raises CollectiveAbortedError if a rank is lost meanwhile, RankLostError if rank 0 is not
    reached.
    """
    from kolovod.core.objects import Objects
    from kolovod.core.world import current
    from kolovod.errors import RankLostError
    from kolovod.net.addresses import interface_to, listen

    world = current()
    if world.size == 1:
        return HashStore()
    objects = Objects(current)
    if world.rank == 0:
        (listener,) = listen([interface_to(world.environment.rendezvous)], world.size)
        host, port = listener.getsockname()[:2]
        fd = listener.detach()
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        objects.broadcast_object((host, port), 0, "torch.distributed.store")
    else:
        host, port = objects.broadcast_object(None, 0, "torch.distributed.store")
        try:
            # TCPStore looks for one that is gone for long, and writes pages about it.
            socket.create_connection((host, port), _REACH_S).close()
            limit = timedelta(seconds=_REACH_S)
            store = TCPStore(host, port, wait_for_workers=False, timeout=limit)
        except (OSError, RuntimeError) as error:
            raise RankLostError(
                f"rank 0 was not reached at its store of torch.distributed, {host}:{port}: {error}"
            ) from error
    store.set_timeout(c10d.default_pg_timeout if timeout is None else timeout)
    return store

"""Stores of ``torch.distributed`` in elastic jobs, whose addresses Kolovod tells all ranks."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from kolovod.core.objects import Objects
from kolovod.core.world import World, current
from kolovod.errors import RankLostError
from kolovod.net.addresses import interface_to, listen

__all__ = ["store_of_replica", "store_of_world"]

_REACH_S = 5.0
"""How long a store is looked for whose address its rank has just told."""
_Address = tuple[str, int]


def store_of_world(timeout: timedelta | None) -> Store:
    """A store for the ranks of the present world, at rank 0; they all call this.

    Raises CollectiveAbortedError if a rank is lost meanwhile, RankLostError if rank 0 is not
    reached.
    """
    world = current()
    if world.size == 1:
        return HashStore()
    objects, name = Objects(current), "torch.distributed.store"
    if world.rank == 0:
        store, address = _serve(world)
        objects.broadcast_object(address, 0, name)
    else:
        store = _reach(objects.broadcast_object(None, 0, name), "rank 0")
    store.set_timeout(c10d.default_pg_timeout if timeout is None else timeout)
    return store


def store_of_replica(replica: int, place: int, timeout: timedelta | None) -> Store:
    """A store for the ranks of this replica, at the first of them.

    All ranks of the world call this, each of which is in a whole replica, with its number and the
    rank's ``place`` there. It ends with the replica. Raises as ``store_of_world``.
    """
    store, told = None, None
    if place == 0:
        store, address = _serve(current())
        told = replica, address
    rows = Objects(current).allgather_object(told, "torch.distributed.replica")
    if store is None:
        addresses: dict[int, _Address] = dict(row for row in rows if row is not None)
        store = _reach(addresses[replica], f"the first rank of replica {replica}")
    store.set_timeout(c10d.default_pg_timeout if timeout is None else timeout)
    return store


def _serve(world: World) -> tuple[Store, _Address]:
    (listener,) = listen([interface_to(world.environment.rendezvous)], world.size)
    host, port = listener.getsockname()[:2]
    fd = listener.detach()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return store, (host, port)


def _reach(address: _Address, whose: str) -> Store:
    host, port = address
    try:
        # TCPStore looks for one that is gone for long, and writes pages about it.
        socket.create_connection((host, port), _REACH_S).close()
        limit = timedelta(seconds=_REACH_S)
        return TCPStore(host, port, wait_for_workers=False, timeout=limit)
    except (OSError, RuntimeError) as error:
        raise RankLostError(
            f"{whose} was not reached at its store of torch.distributed, {host}:{port}: {error}"
        ) from error

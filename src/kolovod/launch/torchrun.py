"""The place of a rank that has met the others through ``torch.distributed``'s store.

That store is open to everybody who can reach its port, so no secret goes through it: it only tells
where rank 0 can be found. Rank 0 runs a ``Store`` of ours with a fresh secret, and gives both out
at a door on this host (door.py). Ranks of several hosts need a common KOLOVOD_SECRET instead.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from kolovod.errors import BootstrapError, StartTimeoutError
from kolovod.launch import messages
from kolovod.launch.auth import new_secret
from kolovod.launch.door import Door, ask_once, unix_door
from kolovod.launch.job_secret import read_secret
from kolovod.launch.network import LOOPBACK, resolve
from kolovod.launch.place import Place
from kolovod.launch.store import Store

__all__ = ["Rendezvous", "TorchStore", "meet"]

_MAX_BYTES = 4096  # of what rank 0 tells


class TorchStore(Protocol):
    """What is used of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all are there; RuntimeError when the time is over."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count, and return the sum."""
        ...


class Rendezvous:
    """A rank's place, and what must stay open as long as worlds are to be formed from it."""

    def __init__(self, place: Place, *servers: Store | Door) -> None:
        """``servers``: on rank 0."""
        self.place = place
        self._servers = servers

    def close(self) -> None:
        """No further world will be formed. Idempotent."""
        for server in self._servers:
            server.close()


def meet(store: TorchStore, rank: int, size: int, timeout_s: float) -> Rendezvous:
    """Meet the other ranks of the job, each of which calls this once for every world.

    Raises StartTimeoutError if rank 0 does not come in time, AuthenticationError if what is found
    in its stead belongs to another user, BootstrapError if the ranks are on several hosts and have
    no KOLOVOD_SECRET in common.
    """
    # Counted by each rank for itself: a store that outlives a world keeps the old world's keys.
    number = store.add(f"kolovod/meetings/{rank}", 1)
    key = f"kolovod/meeting/{number}"
    host = os.environ.get("KOLOVOD_HOST") or socket.gethostname()
    common_secret = read_secret(os.environ)
    if rank == 0:
        told, found = _open(size, host, common_secret)
        store.set(key, json.dumps(told))
        return found
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        heard = store.get(key)
    except (RuntimeError, ValueError) as error:
        raise StartTimeoutError(
            f"rank {rank} did not hear of rank 0 through torch.distributed's store within "
            f"{timeout_s:g} s ({error}). KOLOVOD_START_TIMEOUT_S sets the limit"
        ) from None
    told = _parse(heard, ("host", "store", "door"))
    has_secret = messages.flag(told, "has_secret")
    address, secret = told["store"], common_secret
    if not has_secret and told["host"] == host:
        given = ask_once(told["door"], "", rank, host, time.monotonic() + timeout_s)
        address, secret = (messages.text(given, name, _MAX_BYTES) for name in ("store", "secret"))
    elif not has_secret or not secret:
        raise BootstrapError(
            f"rank 0 is on host {told['host']} and has {_text(has_secret)}, rank {rank} on "
            f"host {host} and has {_text(bool(secret))}: set it to the same random text for all "
            "ranks, for nobody else can vouch for them across hosts"
        )
    return Rendezvous(Place(rank, size, rank, size, host=host, store=address, secret=secret))


def _parse(data: bytes, names: Sequence[str]) -> dict[str, Any]:
    """What rank 0 has told, ``names`` being texts. Raises BootstrapError."""
    if len(data) > _MAX_BYTES:
        raise BootstrapError(f"{len(data)} bytes; at most {_MAX_BYTES} are expected")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BootstrapError(f"no JSON: {type(error).__name__}") from None
    for name in names:
        messages.text(told, name, _MAX_BYTES)
    return messages.mapping(told)


def _text(has_secret: bool) -> str:
    return "a KOLOVOD_SECRET" if has_secret else "no KOLOVOD_SECRET"


def _open(size: int, host: str, common_secret: str) -> tuple[dict[str, Any], Rendezvous]:
    """Rank 0's part: what it tells the others, and its servers."""
    secret = common_secret or new_secret()
    # Where the other hosts reach torch's own store they reach ours as well.
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    ours = Store(secret, size, *(resolve(master.strip("[]")) if common_secret else [LOOPBACK]))
    ours.start()
    place = Place(0, size, 0, size, host=host, store=ours.address, secret=secret)
    told = {"host": host, "store": ours.address, "has_secret": bool(common_secret), "door": ""}
    if common_secret:
        return told, Rendezvous(place, ours)
    name = f"kolovod-{secrets.token_hex(16)}"
    door = unix_door(name, {"store": ours.address, "secret": secret}, size)
    return {**told, "door": name}, Rendezvous(place, door, ours)

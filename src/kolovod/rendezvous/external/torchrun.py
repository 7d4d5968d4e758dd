"""The environment of a rank that has met the others through ``torch.distributed``'s store.

That store is open to everybody who can reach its port, so no secret goes through it: it only tells
where rank 0 can be found. Rank 0 runs a rendezvous server with a fresh secret, and gives both out
at an address exchange on this host (address_exchange.py). Ranks of several hosts need a common
KOLOVOD_SECRET instead.
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
from kolovod.net import messages
from kolovod.net.addresses import LOOPBACK, resolve
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.address_exchange import AddressExchange, ask_once, unix_exchange
from kolovod.rendezvous.external.job_secret import read_secret
from kolovod.rendezvous.rank_environment import RankEnvironment
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Rendezvous", "TorchStore", "meet"]

_MAX_BYTES = 4096  # of what rank 0 tells


class TorchStore(Protocol):
    """The methods of a ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all are there; RuntimeError when the time is over."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count, and return the sum."""
        ...


class Rendezvous:
    """A rank's place, and what must stay open as long as worlds are to be formed from it."""

    def __init__(
        self, environment: RankEnvironment, *servers: RendezvousServer | AddressExchange
    ) -> None:
        """``servers``: on rank 0."""
        self.environment = environment
        self._servers = servers

    def close(self) -> None:
        """Close the servers: no further world will be formed. Idempotent."""
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
    told = _parse(heard, ("host", "rendezvous", "exchange"))
    has_secret = messages.flag(told, "has_secret")
    address, secret = told["rendezvous"], common_secret
    if not has_secret and told["host"] == host:
        given = ask_once(told["exchange"], "", rank, host, time.monotonic() + timeout_s)
        address, secret = (
            messages.text(given, name, _MAX_BYTES) for name in ("rendezvous", "secret")
        )
    elif not has_secret or not secret:
        raise BootstrapError(
            f"rank 0 is on host {told['host']} and has {_text(has_secret)}, rank {rank} on "
            f"host {host} and has {_text(bool(secret))}: set it to the same random text for all "
            "ranks, for nobody else can vouch for them across hosts"
        )
    return Rendezvous(
        RankEnvironment(rank, size, rank, size, host=host, rendezvous=address, secret=secret)
    )


def _parse(data: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Return the facts that rank 0 has told, ``names`` being texts. Raises BootstrapError."""
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
    """Do rank 0's part; return what it tells the others, and its servers."""
    secret = common_secret or new_secret()
    # Where the other hosts reach torch's own store they reach ours as well.
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    ours = RendezvousServer(
        secret, size, *(resolve(master.strip("[]")) if common_secret else [LOOPBACK])
    )
    ours.start()
    environment = RankEnvironment(
        0, size, 0, size, host=host, rendezvous=ours.address, secret=secret
    )
    told = {
        "host": host,
        "rendezvous": ours.address,
        "has_secret": bool(common_secret),
        "exchange": "",
    }
    if common_secret:
        return told, Rendezvous(environment, ours)
    name = f"kolovod-{secrets.token_hex(16)}"
    try:
        exchange = unix_exchange(name, {"rendezvous": ours.address, "secret": secret}, size)
    except BaseException:
        ours.close()
        raise
    return {**told, "exchange": name}, Rendezvous(environment, exchange, ours)

"""Connections between ranks of different hosts: made and authenticated here, for the engine.

Every rank listens on the interface by which it reaches the store. A rank connects to all that come
before it; a host's leader (its first rank) connects once more to the one above it in the tree of
leaders, for the control plane.
After the handshake (auth.py)::

    connecting -> listening   {"rank": rank, "purpose": "data" or "control"}
    listening -> connecting   {"config": {...}}   rank 0's own is everybody's

and from then on the bytes are the engine's (docs/wire.md).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kolovod import _native
from kolovod.errors import BootstrapError, StartTimeoutError
from kolovod.launch.auth import HANDSHAKE_TIMEOUT_S, Channel, Server, connect
from kolovod.launch.store import Member

__all__ = ["Listener", "Links", "interface_to", "link"]

LABEL = "mesh"
_DATA, _CONTROL = "data", "control"


@dataclass
class Links:
    """Connected sockets, for the engine to take over; closed by ``close`` until it has."""

    data: list[int] = field(default_factory=list)
    """By rank; -1 for this one."""
    control: list[int] = field(default_factory=list)
    """By host, in the order of first ranks; -1 where this rank has none."""

    def hand_over(self) -> tuple[list[int], list[int]]:
        """``(data, control)``, which are the caller's from now on."""
        taken = self.data, self.control
        self.data, self.control = [], []
        return taken

    def close(self) -> None:
        """Close what was not handed over."""
        for fd in (*self.data, *self.control):
            if fd >= 0:
                os.close(fd)
        self.data, self.control = [], []


def interface_to(address: str) -> str:
    """The address of this host's interface that leads to ``address`` ("host:port")."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        name: str = probe.getsockname()[0]
        return name


class Listener:
    """Where the ranks that come after this one connect. ``address`` is told to them."""

    def __init__(self, secret: str, interface: str, size: int, config: Mapping[str, int]) -> None:
        self._config = dict(config)
        self._arrivals: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
        listener = socket.create_server((interface, 0), backlog=max(128, size))
        self.address = f"{interface}:{listener.getsockname()[1]}"
        self._server = Server(listener, secret, LABEL, self._serve, max_strangers=64 + 2 * size)
        self._server.start()

    def _serve(self, channel: Channel) -> None:
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        hello = channel.receive(deadline)
        rank, purpose = int(hello["rank"]), str(hello["purpose"])
        channel.send({"config": self._config}, deadline)
        self._arrivals.put((rank, purpose, channel.detach()))

    def collect(
        self, expected: set[tuple[int, str]], members: Sequence[Member], deadline: float
    ) -> dict[tuple[int, str], int]:
        """The connections that are ``expected``, as (rank, purpose); StartTimeoutError."""
        found: dict[tuple[int, str], int] = {}
        try:
            while len(found) < len(expected):
                try:
                    remaining = max(0.0, deadline - time.monotonic())
                    rank, purpose, fd = self._arrivals.get(timeout=remaining)
                except queue.Empty:
                    missing = sorted({rank for rank, _ in expected - found.keys()})
                    names = ", ".join(str(members[rank]) for rank in missing)
                    raise StartTimeoutError(f"{names} did not connect in time") from None
                if (rank, purpose) in expected and (rank, purpose) not in found:
                    found[rank, purpose] = fd
                else:
                    os.close(fd)
        except BaseException:
            for fd in found.values():
                os.close(fd)
            raise
        return found

    def close(self) -> None:
        """Stop listening."""
        self._server.close()
        while not self._arrivals.empty():
            os.close(self._arrivals.get()[2])


def link(
    rank: int, members: Sequence[Member], listener: Listener, secret: str, deadline: float
) -> tuple[Links, dict[str, int] | None]:
    """Connect ``rank`` with all others; rank 0's config too, for the leaders of other hosts.

    Raises BootstrapError if one cannot be reached, StartTimeoutError if one does not come.
    """
    hosts = [member.host for member in members]
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    links = Links([-1] * len(members), [-1] * len(leaders))
    config: dict[str, int] | None = None
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(links.close)
        for other in range(rank):
            links.data[other], config_of_other = _connect(
                rank, _DATA, members[other], secret, deadline
            )
            if other == 0:
                config = config_of_other
        expected = {(other, _DATA) for other in range(rank + 1, len(members))}
        if rank in leaders:
            here = leaders.index(rank)
            for host in _native.tree_neighbours(len(leaders), here):
                leader = leaders[host]
                if host > here:
                    expected.add((leader, _CONTROL))
                    continue
                links.control[host], _ = _connect(rank, _CONTROL, members[leader], secret, deadline)
        for (other, purpose), fd in listener.collect(expected, members, deadline).items():
            if purpose == _DATA:
                links.data[other] = fd
            else:
                links.control[leaders.index(other)] = fd
        cleanup.pop_all()
    return links, config


def _connect(
    rank: int, purpose: str, member: Member, secret: str, deadline: float
) -> tuple[int, dict[str, int]]:
    host, _, port = member.address.rpartition(":")
    try:
        channel = connect(socket.AF_INET, (host, int(port)), secret, LABEL, deadline)
        with contextlib.closing(channel):
            channel.send({"rank": rank, "purpose": purpose}, deadline)
            config: dict[str, int] = channel.receive(deadline)["config"]
            return channel.detach(), config
    except (EOFError, OSError) as error:
        raise BootstrapError(
            f"{member} cannot be reached at {member.address} ({error}): has it ended, or does a "
            "firewall keep the hosts apart?"
        ) from error

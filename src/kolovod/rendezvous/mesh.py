"""Connections between ranks of different hosts: made and authenticated here, for the engine.

Every rank listens on the interface by which it reaches the rendezvous server, from before it joins
there until its world ends. While the world forms, each host's leader (its first rank) connects to
the one above it in the tree of leaders, for the control plane. For data, two ranks are connected
when an algorithm first wants that: the engine asks (``_native.ConnectionBroker``), and of the two
the one that comes later in the world connects. After the handshake (net/channel.py)::

    connecting -> listening   {"protocol": n, "version": text,
                               "rank": rank, "purpose": "data" or "control", "epoch": n,
                               "stripe": which connection for data between the two, from 0}
    listening -> connecting   {"protocol": n, "version": text,
                               "welcome": whether the listening rank is in that world}

and from then on the bytes are the engine's (docs/wire.md), which in a world with KOLOVOD_ENCRYPT
seals them with keys that follow from the same handshake.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from kolovod import _native
from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError
from kolovod.net import messages
from kolovod.net.addresses import address_of, first_that_greets, listen, reach
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel
from kolovod.net.server import Server
from kolovod.rendezvous import versions
from kolovod.rendezvous.protocol import MAX_EPOCH, Formation, Member

__all__ = ["Links", "Listener", "Made", "describe"]

LABEL = "mesh"
_DATA, _CONTROL = "data", "control"
_REACH_S = 10.0  # for a host to answer at all
_PATIENCE_S = 5.0  # with a rank that refuses: the control plane may know better why
_RETRY_S = 0.2
_NO_LIMIT_S = 1e8
_CHECK_PERIOD_S = 0.1
_AT_ONCE = 16


class _OtherReleaseError(BootstrapError):
    """The other end has another protocol: no second try will help."""


class Made(NamedTuple):
    """A connection that the engine takes over."""

    fd: int
    """-1: there is none."""
    keys: _native.RecordKeys | None
    """None: it is not encrypted."""


_NONE = Made(-1, None)


def _made(channel: Channel) -> Made:
    keys = channel.record_keys()
    return Made(channel.detach(), keys)


def describe(new_rank: int, member: Member) -> str:
    """Return a rank's name: "rank 1 on host a (pid 17)", and its launcher rank if that differs."""
    launched = "" if new_rank == member.rank else f", launched as rank {member.rank}"
    return f"rank {new_rank} on host {member.host} (pid {member.pid}{launched})"


class Listener:
    """The sockets to which ranks of other hosts connect; ``address`` is told to them.

    Until ``start`` whoever connects waits in the system's queue.
    """

    def __init__(self, addresses: Sequence[str], size: int) -> None:
        self._size = size
        self._sockets = listen(addresses, backlog=max(128, size))
        self._servers: list[Server] = []
        self.address = ",".join(map(address_of, self._sockets))

    def start(self, secret: str, handler: Callable[[Channel], None]) -> None:
        """Let ``handler`` have the authenticated connections (see ``Server``)."""
        most, label = 64 + 2 * self._size, _label(self.address)
        self._servers = [
            Server(sock, secret, label, handler, max_strangers=most) for sock in self._sockets
        ]
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers = []  # whose handler is the owner's: a circle would keep a world's memory
        self.forget()

    def forget(self) -> None:
        """Close the descriptors in a forked child; the parent goes on listening."""
        for sock in self._sockets:
            sock.close()


class Links:
    """One rank's connections to ranks of other hosts, from the forming of a world to its end.

    The engine takes over those for the control plane (``hand_over``), and finds those for data at
    its ``broker``. It calls ``close`` when it is shut down, ``forget`` in a forked child.
    """

    def __init__(
        self,
        rank: int,
        formation: Formation,
        listener: Listener,
        secret: str,
        *,
        encrypted: bool = False,
    ) -> None:
        """``encrypted``: all connections are encrypted, and no other is made or accepted."""
        self._encrypted = encrypted
        self.broker = _native.ConnectionBroker()
        self.handed_over = False
        self._rank = rank
        self._epoch = formation.epoch
        self._members = formation.members
        self._listener = listener
        self._secret = secret
        hosts = [member.host for member in self._members]
        first: dict[str, int] = {}
        for number, host in enumerate(hosts):
            first.setdefault(host, number)
        self._leaders = list(first.values())
        self._control = [_NONE] * len(self._leaders)
        self._arrivals: queue.SimpleQueue[tuple[int, Made]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calling: set[socket.socket] = set()  # guarded by the lock
        self._closed = False  # guarded by the lock
        self._thread: threading.Thread | None = None

    def connect_leaders(self, deadline: float, check: Callable[[], None]) -> None:
        """Begin to listen; a leader also connects to its neighbours in the tree of leaders.

        ``check``: called now and then; raises if it is known that this is in vain.
        Raises BootstrapError if one cannot be reached, StartTimeoutError if one does not come.
        """
        self._listener.start(self._secret, self._serve)
        if self._rank not in self._leaders:
            return
        here = self._leaders.index(self._rank)
        neighbours = _native.tree_neighbours(len(self._leaders), here)
        for host in neighbours:
            if host < here:
                leader = self._leaders[host]
                try:
                    self._control[host] = self._call(leader, _CONTROL, deadline, deadline, check)
                except (AuthenticationError, EOFError, OSError) as error:
                    raise BootstrapError(self._unreachable(leader, error)) from error
        self._collect({self._leaders[host] for host in neighbours if host > here}, deadline, check)

    def hand_over(self) -> list[Made]:
        """Return connections to leaders, by host, now the engine's; begin those for data."""
        self.handed_over = True
        taken, self._control = self._control, []
        self._thread = threading.Thread(target=self._connect_wanted, name="kolovod links")
        self._thread.daemon = True
        self._thread.start()
        return taken

    def close(self) -> None:
        """Stop listening and connecting; close what the engine has not taken. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sock in self._calling:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.broker.close()
        self._listener.close()
        if self._thread is not None:
            self._thread.join()
        taken, self._control = self._control, []
        while not self._arrivals.empty():
            taken.append(self._arrivals.get()[1])
        for made in taken:
            if made.fd >= 0:
                os.close(made.fd)
        self.broker.forget()  # nobody uses it any more

    def forget(self) -> None:
        """Close the copies of the descriptors that a forked child has."""
        self._listener.forget()
        self.broker.forget()
        for sock in self._calling:
            sock.close()

    def _serve(self, channel: Channel) -> None:
        """Serve somebody who has connected and knows the secret, on a thread of the listener."""
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        if channel.is_sealed != self._encrypted:
            raise AuthenticationError(
                "a rank with another KOLOVOD_ENCRYPT"
            )  # the rendezvous server says so
        hello = channel.receive(deadline)
        if versions.find_other(hello) is not None:
            channel.send({**versions.own(), "welcome": False}, deadline)
            return
        rank = messages.whole(hello, "rank", 0, messages.MAX_RANKS - 1)
        purpose = messages.text(hello, "purpose", 16)
        epoch = messages.whole(hello, "epoch", 0, MAX_EPOCH)
        stripe = messages.whole(hello, "stripe", 0, _native.MOST_STRIPES - 1)
        welcome = epoch == self._epoch and rank < len(self._members)
        channel.send({**versions.own(), "welcome": welcome}, deadline)
        if welcome and purpose == _DATA:
            self.broker.connected(rank, stripe, *_made(channel))
        elif welcome:
            self._arrivals.put((rank, _made(channel)))

    def _collect(self, expected: set[int], deadline: float, check: Callable[[], None]) -> None:
        """Wait until the ``expected`` leaders have connected. Raises StartTimeoutError."""
        while expected:
            try:
                remaining = max(0.0, deadline - time.monotonic())
                rank, made = self._arrivals.get(timeout=min(remaining, _CHECK_PERIOD_S))
            except queue.Empty:
                check()
                if time.monotonic() < deadline:
                    continue
                names = ", ".join(str(self._members[rank]) for rank in sorted(expected))
                raise StartTimeoutError(f"{names} did not connect in time") from None
            if rank in expected:
                expected.remove(rank)
                self._control[self._leaders.index(rank)] = made
            else:
                os.close(made.fd)

    def _connect_wanted(self) -> None:
        """Run the thread: make connections that the engine asks for, some at a time."""
        poll = select.poll()
        poll.register(self.broker.fileno(), select.POLLIN)
        while not self.broker.closed:
            poll.poll()
            wanted = [one for one in self.broker.wanted() if one[0] < self._rank]  # others come
            if len(wanted) == 1:
                self._connect_data(*wanted[0])
                continue
            # Over a long link a handshake takes several times there and back. Not by an executor,
            # which would hold up a process that ends.
            for at in range(0, len(wanted), _AT_ONCE):
                threads = [
                    threading.Thread(target=self._connect_data, args=one, daemon=True)
                    for one in wanted[at : at + _AT_ONCE]
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

    def _connect_data(self, peer: int, stripe: int) -> None:
        started = time.monotonic()
        while not self.broker.closed:
            try:
                # A process may be busy for long; its host answers at once.
                limits = time.monotonic() + _REACH_S, time.monotonic() + _NO_LIMIT_S
                made = self._call(peer, _DATA, *limits, stripe=stripe)
                self.broker.connected(peer, stripe, *made)
                return
            except _OtherReleaseError as error:
                self.broker.failed(str(error))
                return
            except (AuthenticationError, EOFError, OSError) as error:
                if time.monotonic() - started >= _PATIENCE_S:
                    self.broker.failed(self._unreachable(peer, error))
                    return
            time.sleep(_RETRY_S)

    def _call(
        self,
        peer: int,
        purpose: str,
        reached_by: float,
        answered_by: float,
        check: Callable[[], None] = lambda: None,
        stripe: int = 0,
    ) -> Made:
        """Return a connection to ``peer``. Raises AuthenticationError, EOFError, OSError."""

        def stop() -> bool:
            check()
            return self._closed

        address = self._members[peer].address
        found = self._watched(reach(address, reached_by, stop))
        try:
            label, encrypted = _label(address), self._encrypted
            channel = first_that_greets(
                found, address, self._secret, label, answered_by, encrypted=encrypted
            )
            with contextlib.closing(channel):
                hello = {"rank": self._rank, "purpose": purpose, "epoch": self._epoch}
                channel.send({**versions.own(), **hello, "stripe": stripe}, answered_by)
                answer = channel.receive(answered_by)
                if (other := versions.find_other(answer)) is not None:
                    raise _OtherReleaseError(
                        f"{describe(peer, self._members[peer])} has {other}, but "
                        f"{describe(self._rank, self._members[self._rank])} has {versions.OURS}: "
                        f"{versions.ADVICE}"
                    )
                if not messages.flag(answer, "welcome"):
                    raise EOFError("another world listens there")
                return _made(channel)
        finally:
            found.close()

    def _watched(self, found: Iterator[socket.socket]) -> Generator[socket.socket, None, None]:
        """Yield the sockets of ``found``; ``close`` wakes a thread that waits at one of them."""
        last: set[socket.socket] = set()
        try:
            for sock in found:
                with self._lock:
                    if self._closed:
                        sock.close()
                        raise EOFError("the world has ended")
                    self._calling -= last
                    last = {sock}
                    self._calling |= last
                yield sock
        finally:
            with self._lock:
                self._calling -= last

    def _unreachable(self, peer: int, error: BaseException) -> str:
        return (
            f"{describe(peer, self._members[peer])} cannot be reached at "
            f"{self._members[peer].address} from {describe(self._rank, self._members[self._rank])} "
            f"({error}): has it ended, or does a firewall keep the hosts apart?"
        )


def _label(address: str) -> str:
    """Return a label with the address, so a handshake passed on to another rank is found out."""
    return f"{LABEL} {address}"

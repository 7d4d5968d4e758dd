"""The meeting of ranks of a job without a secret of ours: rank 0 tells where the rendezvous is.

On one host rank 0 opens an AF_UNIX socket, where the kernel vouches for the user at either end, and
gives out a fresh secret. Between hosts it opens one on a TCP port that all ranks know, and whoever
comes proves the job's secret. After the handshake (net/channel.py)::

    rank -> rank 0   {"rank", "host", "pid", "process": random}
    rank 0 -> rank   {"facts": {...}}    or   {"gone": text}

Every rank is let in once. Whoever comes again is a later program of the same job, whose own rank 0
has not come yet: it is told so, and tries again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kolovod.errors import AuthenticationError, BootstrapError, StartTimeoutError
from kolovod.net import messages
from kolovod.net.addresses import connect_any, endpoint, listen
from kolovod.net.channel import HANDSHAKE_TIMEOUT_S, Channel, connect
from kolovod.net.lost_hosts import notice_lost_host
from kolovod.net.server import Server
from kolovod.net.unix_sockets import listen_abstract

__all__ = [
    "AddressExchange",
    "RefusedError",
    "ask",
    "ask_once",
    "close_at_exit",
    "tcp_exchange",
    "unix_exchange",
]

LABEL = "address-exchange"
_MAX_TEXT = 1 << 13
_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_REFUSED_S = 3.0  # a rank 0 that is just ending breaks off as one with another secret does
_PROCESS = secrets.token_hex(16)  # a pid may be another process's, too, in another namespace


class RefusedError(BootstrapError):
    """The process that holds the exchange says that this process has no place there."""


class AddressExchange:
    """A server that tells every rank that comes in ``facts``, once.

    It is thread based; ``close`` ends the threads.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: str,
        facts: dict[str, Any],
        size: int,
    ) -> None:
        """``secret``: "" where the kernel vouches for whoever comes in. Takes over the sockets."""
        self._facts = facts
        self._size = size
        self._lock = threading.Lock()
        self._told: dict[int, tuple[str, str]] = {}  # by rank: which process, and where that is
        self._pid = os.getpid()
        self._servers = [
            Server(listener, secret, LABEL, self._serve, max_strangers=64 + size)
            for listener in listeners
        ]
        for server in self._servers:
            server.start()

    def _serve(self, channel: Channel) -> None:
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        channel.send(self._answer(channel.receive(deadline)), deadline)

    def _answer(self, message: Any) -> dict[str, Any]:
        try:
            rank = messages.whole(message, "rank", 0, messages.MAX_RANKS)
            process, host = (
                messages.text(message, "process", 64),
                messages.text(message, "host", 255),
            )
            where = f"on host {host} (pid {messages.whole(message, 'pid', 0, 1 << 31)})"
        except BootstrapError as error:
            return {"gone": str(error)}
        if not 0 < rank < self._size:
            return {"gone": f"there is no rank {rank} to come: the job has {self._size} ranks"}
        with self._lock:
            known, known_where = self._told.setdefault(rank, (process, where))
        if known == process:
            return {"facts": self._facts}
        return {"gone": f"rank {rank} has come already, {known_where}"}

    def close(self) -> None:
        """Let nobody in any more. Idempotent; does nothing in a forked process."""
        if os.getpid() == self._pid:
            for server in self._servers:
                server.close()


def unix_exchange(name: str, facts: dict[str, Any], size: int) -> AddressExchange:
    """Open an exchange on this host, for processes of this user.

    ``name``: of an abstract socket. Raises BootstrapError if it is taken.
    """
    try:
        listener = listen_abstract(name, 64 + size)
    except OSError as error:
        raise BootstrapError(
            f"rank 0 cannot open the socket where the ranks of this job meet ({error.strerror}): "
            "does another process of this job run as rank 0, too, or a child that it left behind?"
        ) from error
    return AddressExchange([listener], "", facts, size)


def tcp_exchange(
    addresses: Sequence[str], port: int, secret: str, facts: dict[str, Any], size: int
) -> AddressExchange:
    """Open an exchange between hosts, at all of the ``addresses`` that can be had.

    Raises BootstrapError if there is none: the port is taken, or the addresses are not ours.
    """
    try:
        listeners = listen(addresses, max(128, size), port)
    except BootstrapError as error:
        where = ",".join(endpoint(address, port) for address in addresses)
        raise BootstrapError(
            f"rank 0 cannot listen on {where}, where the ranks of this job are to meet "
            f"({error}). If another job has the port, set KOLOVOD_STORE_PORT to a free "
            "one; if the address is another host's, KOLOVOD_STORE_HOST to this one's; the same for "
            "all ranks"
        ) from error
    return AddressExchange(listeners, secret, facts, size)


def close_at_exit(close: Callable[[], None]) -> None:
    """Call ``close`` when this process ends, but not when one ends that was forked from it.

    There it would shut the sockets that both hold.
    """
    pid = os.getpid()
    atexit.register(lambda: close() if os.getpid() == pid else None)


def ask(
    address: str | tuple[str, int], secret: str, rank: int, host: str, timeout_s: float
) -> dict[str, Any]:
    """Return the facts that rank 0 gives out in its exchange; wait for it to open.

    ``address``: the name of an abstract socket, or host and port; of a host's addresses, IPv4 and
    IPv6, the first counts where somebody proves the secret. Raises StartTimeoutError if rank
    0 does not come in time, AuthenticationError if it is another user's, or does not know
    ``secret``.
    """
    deadline = time.monotonic() + timeout_s
    why = ""
    pause_s = _RETRY_S
    refused_at: float | None = None
    while True:
        # A socket that a dead rank 0's child still holds answers nothing: do not wait there.
        attempt = min(deadline, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        try:
            return ask_once(address, secret, rank, host, attempt)
        except AuthenticationError:
            now = time.monotonic()
            refused_at = now if refused_at is None else refused_at
            if now >= min(refused_at + _REFUSED_S, deadline - pause_s):
                raise
        except BootstrapError as error:
            refused_at = None
            if not why or time.monotonic() < deadline:  # else it only says that time is up
                why = str(error)
        if time.monotonic() + pause_s >= deadline:
            raise StartTimeoutError(
                f"{why}. It was tried for {timeout_s:g} s; KOLOVOD_START_TIMEOUT_S sets the limit"
            )
        time.sleep(pause_s)
        pause_s = min(_MAX_RETRY_S, 1.5 * pause_s)


def ask_once(
    address: str | tuple[str, int],
    secret: str,
    rank: int,
    host: str,
    deadline: float,
    *,
    label: str = LABEL,
    answer_by: float | None = None,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask as ``ask`` does, at an exchange that has been opened.

    Raises BootstrapError if it is shut, RefusedError if it does not let this rank in.

    ``label``: of another kind of exchange; ``also``: what is said there besides; ``answer_by``:
    until when it may wait with its answer, if longer.
    """
    if isinstance(address, str):
        where = "on this host"
    else:
        where = f"at {endpoint(*address)}"
    message = {"rank": rank, "host": host, "pid": os.getpid(), "process": _PROCESS, **(also or {})}
    try:
        if isinstance(address, str):
            channel = connect(socket.AF_UNIX, f"\0{address}", secret, label, deadline)
        else:
            channel = connect_any(endpoint(*address), secret, label, deadline)
        with contextlib.closing(channel):
            channel.send(message, deadline)
            if answer_by is not None:
                notice_lost_host(channel.fileno())
            answer = channel.receive(answer_by or deadline)
    except AuthenticationError as error:
        raise AuthenticationError(f"rank {rank} cannot meet rank 0 {where}: {error}") from None
    except (EOFError, OSError) as error:
        apart = "is it in another network namespace"
        reasons = apart if isinstance(address, str) else "is a firewall between"
        raise BootstrapError(
            f"rank {rank} cannot reach rank 0 {where} ({error}): has it ended, or not called "
            f"init() yet, or {reasons}?"
        ) from None
    try:
        answer = messages.mapping(answer)
        if "facts" in answer:
            return messages.mapping(answer["facts"])
        why = messages.text(answer, "gone", _MAX_TEXT)
    except BootstrapError as error:  # of another version, say
        raise BootstrapError(
            f"rank {rank} cannot make sense of what rank 0 answers {where}: {error}. Do all ranks "
            "run the same version of kolovod?"
        ) from None
    raise RefusedError(f"rank {rank} is not expected by rank 0 {where}: {why}")

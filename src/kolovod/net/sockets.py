"""Sockets whose every wait has a deadline, in ``time.monotonic()`` seconds."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

__all__ = ["close_all", "hang_up", "poll_until", "read_exactly", "set_deadline", "shut"]

_LONGEST_WAIT_S = 2e6  # the kernel counts milliseconds in 31 bits


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Let the next call end by ``deadline``. Raises TimeoutError if that has passed."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(min(remaining, _LONGEST_WAIT_S))


def poll_until(poll: select.poll, deadline: float) -> list[tuple[int, int]]:
    """Poll until ``deadline`` (``time.monotonic()`` seconds), however far that is."""
    while True:
        remaining = max(0.0, deadline - time.monotonic())
        ready = poll.poll(min(remaining, _LONGEST_WAIT_S) * 1000)
        if ready or remaining <= _LONGEST_WAIT_S:
            return ready


def read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Return exactly ``count`` bytes; the deadline is for all, however slowly they trickle in.

    Raises EOFError if the other end closes the connection before, OSError.
    """
    chunks = bytearray()
    while len(chunks) < count:
        set_deadline(sock, deadline)
        chunk = sock.recv(min(count - len(chunks), 1 << 16))
        if not chunk:
            raise EOFError("the connection was closed")
        chunks += chunk
    return bytes(chunks)


def shut(sock: socket.socket) -> None:
    """End both directions of a connection, or the waiting for one; the descriptor stays."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in accept or recv


def hang_up(sock: socket.socket) -> None:
    """Close a socket; a thread that waits on it is woken."""
    shut(sock)
    sock.close()


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)

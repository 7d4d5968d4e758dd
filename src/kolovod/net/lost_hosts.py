"""A connection to a host that vanishes breaks soon."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

__all__ = ["UNACKNOWLEDGED_S", "HostWatch", "notice_lost_host"]

UNACKNOWLEDGED_S = 1.0
_BETWEEN_LOOKS_S = 0.5
_UNACKNOWLEDGED = struct.Struct(
    "24xI"
)  # the part of struct tcp_info (linux/tcp.h) up to tcpi_unacked


def notice_lost_host(fd: int) -> None:
    """Let the TCP connection break when its host acknowledges nothing that is sent for a second.

    The host's kernel acknowledges, however busy its processes are. Where nothing is sent, kernels
    ask each other once a second; other kinds of sockets stay as they are. The kernel counts from
    its first retransmission on, and looks at its own times: who needs to know sooner asks
    ``HostWatch``, too.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        try:
            milliseconds = int(UNACKNOWLEDGED_S * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        finally:
            sock.detach()


class HostWatch:
    """Says how long the host at the other end has acknowledged nothing of what was sent.

    It must be asked before each message, so that time in which this process had sent nothing does
    not count; nor does time in which it stood still itself (``csrc/transport/host_watch.h`` is the
    same for ranks).
    """

    def __init__(self, fd: int) -> None:
        """``fd``: of the socket, which stays open meanwhile."""
        self._fd = fd
        self._clear_s = self._looked_s = time.monotonic()

    def due_s(self) -> float:
        """Return when it will have been silent for UNACKNOWLEDGED_S, by ``time.monotonic()``."""
        now = time.monotonic()
        self._clear_s += max(0.0, now - self._looked_s - _BETWEEN_LOOKS_S)
        self._looked_s = now
        if not _has_unacknowledged(self._fd):
            self._clear_s = now
        return self._clear_s + UNACKNOWLEDGED_S

    def check(self) -> None:
        """Raise TimeoutError if it has been silent for so long."""
        if self.due_s() <= time.monotonic():
            raise TimeoutError(f"its host acknowledges nothing for {UNACKNOWLEDGED_S:g} s")


def _has_unacknowledged(fd: int) -> bool:
    try:
        with socket.socket(fileno=fd) as sock:
            try:
                size = _UNACKNOWLEDGED.size
                given = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            finally:
                sock.detach()
        return len(given) == size and _UNACKNOWLEDGED.unpack(given)[0] > 0
    except OSError:  # no TCP, or a sandbox that does not say
        return False

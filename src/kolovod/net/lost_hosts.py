"""A connection to a host that vanishes breaks soon."""

from __future__ import annotations

import contextlib
import socket

__all__ = ["notice_lost_host"]

_UNACKNOWLEDGED_MS = 1000


def notice_lost_host(fd: int) -> None:
    """Let the TCP connection break when its host acknowledges nothing that is sent for a second.

    The host's kernel acknowledges, however busy its processes are. Something must be sent now and
    then; other kinds of sockets stay as they are.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=fd) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        finally:
            sock.detach()

"""Ports for what must be told its port before anything listens there."""

from __future__ import annotations

import os
import socket

_FIRST, _COUNT = 29_000, 3_000
"""Above those that jobs take by themselves (20000 to 28999), below those that the system gives to
connections (from 32768 on)."""

_held: list[socket.socket] = []


def reserve_port() -> int:
    """A free TCP port, which no other call gets while this process lives, in any process.

    What tells other tests, in this worker or another, is a UDP socket of that number; TCP is left
    to the test. The system closes the socket when the process ends, however it ends.
    """
    for attempt in range(_COUNT):
        port = _FIRST + (os.getpid() + attempt) % _COUNT
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.create_server(("", port)):  # no service of the machine is there
                pass
        except OSError:
            mark.close()
            continue
        _held.append(mark)
        return port
    raise AssertionError(f"no port of {_COUNT} from {_FIRST} on is free")


def refusing_port() -> socket.socket:
    """A TCP socket of 127.0.0.1 at which connections are refused until the caller closes it."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    return sock

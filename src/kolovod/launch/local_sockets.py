"""How processes of this user on this host find each other: by sockets and locks in folders.

The names of sockets have 107 bytes at most; paths here may be longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["connect_to", "hold", "is_held", "listen_at"]

_HOLD_S = 1.0
_held: list[int] = []


def hold(folder: Path) -> None:
    """Lock ``folder`` until this process ends. Raises OSError if another one has."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _HOLD_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(fd)
            return
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise
            time.sleep(0.01)  # somebody may be asking


def is_held(folder: Path) -> bool:
    """Whether a process that lives holds ``folder``."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def listen_at(path: Path) -> socket.socket:
    """Listen there, in the place of whoever has done so before."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        with _short(path.parent) as folder:
            listener.bind(f"{folder}/{path.name}")
        listener.listen(4)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(path: Path) -> socket.socket:
    """To who listens there. Raises OSError if nobody does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)

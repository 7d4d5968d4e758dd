"""A sign to others of this user that a process lives: a lock on a folder of its own."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["hold", "is_held"]

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
    """Return whether a process that lives holds ``folder``."""
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

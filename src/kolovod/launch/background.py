"""Processes that are started without holding up this one, also if they outlive it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

__all__ = ["popen_apart", "start_in_background"]

_lock = threading.Lock()
_started: list[subprocess.Popen[bytes]] = []
"""Kept, since a handle that is dropped complains of a process that still runs."""


def popen_apart(command: Sequence[str], **arguments: Any) -> subprocess.Popen[bytes]:
    """Do as ``subprocess.Popen``, but only the calling thread waits until ``command`` executes.

    Python starts a process by vfork(2) where it can, and some releases (3.10, 3.13) hold their lock
    until the process executes its file, which a file server may delay by seconds: nothing of this
    process would run meanwhile. One that sets its user, even to what it is, is started by fork(2).
    """
    return subprocess.Popen(command, user=os.getuid(), **arguments)


def start_in_background(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, with nothing to read or to write to.

    Raises OSError.
    """
    with _lock:
        _started[:] = [process for process in _started if process.poll() is None]
    process = popen_apart(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with _lock:
        _started.append(process)
    return process

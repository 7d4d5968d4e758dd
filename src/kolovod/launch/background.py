"""Processes that go on when the one that has started them ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

__all__ = ["start_in_background"]

_lock = threading.Lock()
_started: list[subprocess.Popen[bytes]] = []
"""Kept, since a handle that is dropped complains of a process that still runs."""


def start_in_background(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, with nothing to read or to write to.

    Raises OSError.
    """
    with _lock:
        _started[:] = [process for process in _started if process.poll() is None]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with _lock:
        _started.append(process)
    return process

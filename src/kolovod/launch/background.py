"""Processes that go on when the one that has started them ends."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

__all__ = ["start_in_background"]

_started: list[subprocess.Popen[bytes]] = []
"""Kept, since a handle that is dropped complains of a process that still runs."""


def start_in_background(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, with nothing to read or to write to.

    Raises OSError.
    """
    for before in [process for process in _started if process.poll() is not None]:
        _started.remove(before)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _started.append(process)
    return process

"""Where the main thread is, for the engine to ask when this rank is late.

``faulthandler`` writes the Python stack from within a signal handler, so it answers also while the
main thread holds the GIL in native code or does not come back to the interpreter. It writes into a
pipe, and the engine, which sends the signal, reads the other end.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from dataclasses import dataclass

from kolovod import _native

__all__ = ["SIGNAL", "source"]

SIGNAL = int(signal.SIGRTMIN) + 11
"""What the main thread gets; if the process uses it itself, the next real-time signal is taken."""


@dataclass(frozen=True)
class _Installed:
    signum: int
    read_fd: int
    write_fd: int
    source: _native.StackSource


_installed: _Installed | None = None


def source() -> _native.StackSource | None:
    """The process's one source of stacks, installed on the first call; None: no signal is free."""
    global _installed
    if _installed is None:
        signum = _free_signal()
        if signum is None:
            return None
        # Not blocking: a handler that waits for room in the pipe would stop the process.
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        faulthandler.register(signum, file=write_fd, all_threads=False, chain=False)
        _installed = _Installed(
            signum, read_fd, write_fd, _native.StackSource(int(signum), read_fd)
        )
    return _installed.source


def _free_signal() -> int | None:
    """One that has its default action, whoever might have changed that: Python or native code."""
    taken = _caught_or_ignored()
    for signum in (*range(SIGNAL, signal.SIGRTMAX), *range(int(signal.SIGRTMIN) + 1, SIGNAL)):
        if not taken >> (signum - 1) & 1:
            return int(signum)
    return None


def _caught_or_ignored() -> int:
    """A bit for each signal, the lowest for signal 1; all of them if the system does not say."""
    mask = 0
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            lines = [line for line in file if line.startswith(("SigCgt:", "SigIgn:"))]
    except OSError:
        lines = []
    if len(lines) != 2:
        return -1
    for line in lines:
        mask |= int(line.split()[1], 16)
    return mask


def _after_fork_in_child() -> None:
    """The pipe is the parent's: a child must not write into it."""
    global _installed
    if _installed is None:
        return
    faulthandler.unregister(_installed.signum)
    os.close(_installed.read_fd)
    os.close(_installed.write_fd)
    _installed = None


os.register_at_fork(after_in_child=_after_fork_in_child)

"""Processes of another user on this host, for tests that run as root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import pytest

__all__ = ["NOBODY", "as_nobody", "needs_root", "running_as_nobody"]

NOBODY = 65534
_PR_SET_DUMPABLE = 4

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to be another user")


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    # As a process is that has begun as this user: else what it has in /proc is root's.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@contextlib.contextmanager
def running_as_nobody(prepare: Callable[[], object]) -> Iterator[int]:
    """The pid of a child that has called ``prepare`` as that user, and waits then."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            _become_nobody()
            kept = prepare()
            os.write(sink, b".")
            signal.pause()
            del kept
        os._exit(1)
    os.close(sink)
    try:
        assert os.read(source, 1) == b".", "it could not be prepared"
        yield pid
    finally:
        os.close(source)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def as_nobody(act: Callable[[], object]) -> int:
    """The exit code of a child that has done this as that user: 0 unless it raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            _become_nobody()
            act()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

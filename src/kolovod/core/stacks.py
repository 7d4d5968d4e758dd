"""The stacks of this process: for the engine, if the rank is late, and for ``kolovod stacks``.

``faulthandler`` writes the Python stack from within a signal handler, so it answers also while the
main thread holds the GIL in native code or does not come back to the interpreter. For the engine it
writes that of the main thread into a pipe, and the engine, which sends the signal, reads the other
end. For other processes it writes those of all threads into another pipe. A process that asks finds
an empty file in memory among this process's descriptors, which only the same user may open; the
file's name gives the signal and the pipe. So it writes nothing into what another process has.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import select
import signal
import time
from dataclasses import dataclass

from kolovod import _native
from kolovod.core.other_process import OtherProcess
from kolovod.net.sockets import close_all
from kolovod.printable import printable

__all__ = ["SIGNAL", "StacksUnavailableError", "answer_others", "of_process", "source"]

SIGNAL = int(signal.SIGRTMIN) + 11
"""The signal for the main thread; if the process uses it itself, the next real-time signal is
taken."""


@dataclass(frozen=True)
class _Installed:
    signum: int
    read_fd: int
    write_fd: int
    source: _native.StackSource


_installed: _Installed | None = None
_for_others: tuple[int, list[int]] | None = None  # signal and descriptors

_NAME = "kolovod-stacks-"  # the signal, and the end of the pipe that is read
_PATTERN = re.compile(rf"{_NAME}([0-9]{{1,3}})-([0-9]{{1,7}})")
_PIPE_BYTES = 1 << 18  # of hundreds of threads: who asks may be late to read
_MOST_BYTES = 8 << 20
_QUIET_S = 0.05  # without anything new, an answer is whole if its writer has ended


class StacksUnavailableError(Exception):
    """A process does not say where it is; the text tells why."""


def source() -> _native.StackSource | None:
    """The process's one source of stacks, installed on the first call; None: no signal is free."""
    global _installed
    if _installed is None:
        signum = _free_signal(SIGNAL)
        if signum is None:
            return None
        # Not blocking: a handler that waits for room in the pipe would stop the process.
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        faulthandler.register(signum, file=write_fd, all_threads=False, chain=False)
        _installed = _Installed(
            signum, read_fd, write_fd, _native.StackSource(int(signum), read_fd)
        )
    return _installed.source


def answer_others() -> None:
    """From now on ``of_process`` gets this process's stacks, if the system lets it."""
    global _for_others
    if _for_others is not None or (signum := _free_signal(SIGNAL + 1)) is None:
        return
    fds: list[int] = []
    try:
        # Not blocking: nobody may read, and a handler that waits would stop the process.
        fds += os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fds.append(os.memfd_create(f"{_NAME}{signum}-{fds[0]}", os.MFD_CLOEXEC))
    except OSError:  # a sandbox
        close_all(fds)
        return
    with contextlib.suppress(OSError):  # the user has as many pipes as are allowed
        fcntl.fcntl(fds[1], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    faulthandler.register(signum, file=fds[1], all_threads=True, chain=False)
    _for_others = signum, fds


def of_process(pid: int, timeout_s: float = 2.0) -> str:
    """The Python stacks of all threads of another process of this user, as faulthandler has them.

    Of another user's for root. What would steer a terminal is written out. Raises
    StacksUnavailableError for one that has not called ``init``, has ended or does not answer.
    """
    try:
        with contextlib.closing(OtherProcess(pid)) as process, process.as_its_user():
            signum, fd = _place_of(process)
            try:
                text = _ask(process, signum, fd, timeout_s)
            finally:
                os.close(fd)
        return printable(text.decode(errors="replace"), keep="\n")
    except PermissionError:
        raise StacksUnavailableError("it is another user's") from None
    except OSError:
        raise StacksUnavailableError("it has ended") from None


def _place_of(process: OtherProcess) -> tuple[int, int]:
    """The signal at which a process writes its stacks, and the pipe that these come from.

    The caller closes that. Raises what ``of_process`` does.
    """
    found = process.open_memory(_PATTERN)
    if found is not None:
        name, fd = found
        os.close(fd)
        signum = int(name[1])
        # A signal that nobody catches would end it.
        if signum > 0 and int(process.status("SigCgt"), 16) >> (signum - 1) & 1:
            return signum, process.open_pipe(int(name[2]), os.O_RDONLY)
    raise StacksUnavailableError("it has not called kolovod.init() yet")


def _ask(process: OtherProcess, signum: int, fd: int, timeout_s: float) -> bytes:
    """Send the signal; return the text that the process then writes into the pipe ``fd``.

    Raises what ``of_process`` does.
    """
    _read(fd)  # of an answer that came too late for who had asked
    # Where the main thread blocks the signal for itself, another thread answers.
    blocks = _main_thread_blocks(process, signum)
    process.send_signal(signum)
    text, since = b"", time.monotonic()
    until = since + timeout_s
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (
        not text
        or time.monotonic() - since < _QUIET_S
        or (not blocks and _main_thread_blocks(process, signum))
    ):
        if time.monotonic() > until or len(text) > _MOST_BYTES:
            if text:
                break  # stopped in the middle: that is better than nothing
            state = printable(process.status("State"))
            raise StacksUnavailableError(
                f"no answer within {timeout_s:g} s; the system says {state}"
            )
        if any(events & select.POLLHUP for _, events in poll.poll(5)):
            raise ProcessLookupError(f"process {process.pid} has closed its pipe")
        if more := _read(fd):
            text, since = text + more, time.monotonic()
    return text


def _read(fd: int) -> bytes:
    """Return the bytes in a pipe, at most as many as it can hold."""
    try:
        return os.read(fd, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _main_thread_blocks(process: OtherProcess, signum: int) -> bool:
    """Return whether the main thread blocks the signal, as it does while it is in its handler.

    faulthandler writes in many small parts. A quiet moment alone does not tell that the text is
    whole: its writer may have lost the core.
    """
    try:
        return bool(int(process.status("SigBlk"), 16) >> signum - 1 & 1)
    except OSError:  # it has ended
        return False


def _free_signal(first: int) -> int | None:
    """Return a signal with its default action, which Python or native code might have changed.

    ``first``, or the next one.
    """
    taken = _caught_or_ignored()
    for signum in (*range(first, signal.SIGRTMAX), *range(int(signal.SIGRTMIN) + 1, first)):
        if not taken >> (signum - 1) & 1:
            return int(signum)
    return None


def _caught_or_ignored() -> int:
    """A bit for each signal, the lowest for signal 1; all of them if the system does not say."""
    mask = 0
    try:
        # Bytes: a rank that has become another user may not be able to import a codec.
        with open("/proc/self/status", "rb") as file:
            lines = [line for line in file if line.startswith((b"SigCgt:", b"SigIgn:"))]
    except OSError:
        lines = []
    if len(lines) != 2:
        return -1
    for line in lines:
        mask |= int(line.split()[1], 16)
    return mask


def _after_fork_in_child() -> None:
    """Close the pipes in a forked child, which must not write into its parent's."""
    global _installed, _for_others
    if _for_others is not None:
        signum, fds = _for_others
        faulthandler.unregister(signum)
        close_all(fds)
        _for_others = None
    if _installed is None:
        return
    faulthandler.unregister(_installed.signum)
    os.close(_installed.read_fd)
    os.close(_installed.write_fd)
    _installed = None


os.register_at_fork(after_in_child=_after_fork_in_child)

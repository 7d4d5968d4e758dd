"""Where this process is: for the engine to ask when the rank is late, and for ``kolovod stacks``.

``faulthandler`` writes the Python stack from within a signal handler, so it answers also while the
main thread holds the GIL in native code or does not come back to the interpreter. For the engine it
writes that of the main thread into a pipe, and the engine, which sends the signal, reads the other
end. For other processes it writes those of all threads into a file in memory, whose name tells them
the signal; they find it among the process's descriptors, which only the same user may open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from kolovod import _native

__all__ = ["SIGNAL", "StacksUnavailableError", "answer_others", "of_process", "source"]

SIGNAL = int(signal.SIGRTMIN) + 11
"""What the main thread gets; if the process uses it itself, the next real-time signal is taken."""


@dataclass(frozen=True)
class _Installed:
    signum: int
    read_fd: int
    write_fd: int
    source: _native.StackSource


_installed: _Installed | None = None
_for_others: tuple[int, int] | None = None  # signal and descriptor

_NAME = "kolovod-stacks-"  # and the signal
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
    try:
        fd = os.memfd_create(f"{_NAME}{signum}", os.MFD_CLOEXEC)
    except OSError:  # a sandbox
        return
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # who has read it makes it empty
    faulthandler.register(signum, file=fd, all_threads=True, chain=False)
    _for_others = signum, fd


def of_process(pid: int, timeout_s: float = 2.0) -> str:
    """The Python stacks of all threads of another process of this user, as faulthandler has them.

    Raises StacksUnavailableError for one that has not called ``init``, has ended or does not
    answer.
    """
    process = Path(f"/proc/{pid}")
    try:
        path, signum = _place_of(process)
        with path.open("r+b", buffering=0) as file:
            begin = file.seek(0, os.SEEK_END)
            # Where the main thread blocks the signal for itself, another thread answers.
            blocks = _main_thread_blocks(process, signum)
            os.kill(pid, signum)
            end, since = begin, time.monotonic()
            while (
                end == begin
                or time.monotonic() - since < _QUIET_S
                or (not blocks and _main_thread_blocks(process, signum))
            ):
                if time.monotonic() - since > timeout_s:
                    if end != begin:
                        break  # stopped in the middle: that is better than nothing
                    state = _status(process, "State")
                    raise StacksUnavailableError(
                        f"no answer within {timeout_s:g} s; the system says {state}"
                    )
                time.sleep(0.005)
                if (size := file.seek(0, os.SEEK_END)) != end:
                    end, since = size, time.monotonic()
            file.seek(begin)
            text = file.read()
            file.truncate(0)
        return text.decode(errors="replace")
    except PermissionError:
        raise StacksUnavailableError("it is another user's") from None
    except OSError:
        raise StacksUnavailableError("it has ended") from None


def _place_of(process: Path) -> tuple[Path, int]:
    """Where a process writes its stacks, and at which signal. Raises what ``of_process`` does."""
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry).removeprefix("/memfd:").removesuffix(" (deleted)")
            number = name.removeprefix(_NAME)
            if name == number or not number.isdecimal():
                continue
            # A signal that nobody catches would end it.
            if int(_status(process, "SigCgt"), 16) >> (int(number) - 1) & 1:
                return entry, int(number)
    raise StacksUnavailableError("it has not called kolovod.init() yet, or has left its world")


def _main_thread_blocks(process: Path, signum: int) -> bool:
    """As it does while it is in the signal's handler: faulthandler writes in many small parts.

    A quiet moment alone does not tell that the text is whole: its writer may have lost the core.
    """
    try:
        return bool(int(_status(process, "SigBlk"), 16) >> signum - 1 & 1)
    except OSError:  # it has ended
        return False


def _status(process: Path, name: str) -> str:
    text = (process / "status").read_text(errors="replace")
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}:")]
    return line.partition(":")[2].strip()


def _free_signal(first: int) -> int | None:
    """One that has its default action, whoever might have changed that: Python or native code.

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
    """What is written into is the parent's: a child must not write there."""
    global _installed, _for_others
    if _for_others is not None:
        signum, fd = _for_others
        faulthandler.unregister(signum)
        os.close(fd)
        _for_others = None
    if _installed is None:
        return
    faulthandler.unregister(_installed.signum)
    os.close(_installed.read_fd)
    os.close(_installed.write_fd)
    _installed = None


os.register_at_fork(after_in_child=_after_fork_in_child)

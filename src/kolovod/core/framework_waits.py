"""Looks at a framework's own threads: whether they have come to rest, and which wait in it.

A graph of TensorFlow or a program of JAX waits for an operation in no call of ours: the thread that
runs it sleeps somewhere in the framework, and so do the framework's own threads. Nothing says that
they do not compute. But a thread that computes runs, and the system counts how often each thread
has been switched, which stays the same while it sleeps. So a process has come to rest if at
``_LOOKS`` looks, one every ``PERIOD_S``, all of this held:

- no thread has run since the look before, but for those that cannot carry a computation on: the
  engine's, those that wait for an operation, and Python's. These are told by what they do: one that
  runs the script must sleep within the framework, another one must just not run at the time;
- no thread runs Python that Python has not started: so a framework calls back;
- those that could carry one on wait for another thread, or for time to pass, as TensorFlow's
  housekeeping does for 30 s each time; none waits for a file or a network, and the process has no
  device open that might compute.

Where a thread sleeps its native stack says: the innermost return address on it that is not of the C
library's lies in a library of the framework. All this is Linux's: where ``/proc`` lacks a part, no
process ever comes to rest.
"""

from __future__ import annotations

import bisect
import os
import platform
import re
import sys
import threading
from collections.abc import Container
from typing import NamedTuple

from kolovod.core.call_lines import script_frame

__all__ = ["PERIOD_S", "Looks"]

PERIOD_S = 0.5
_LOOKS = 10
_ENGINE_THREADS = {b"kv-engine", b"kv-device", b"kv-control"}  # csrc names them
_STATUS = re.compile(
    rb"Name:\t([^\n]*)\n.*?\nState:\t(.).*\nvoluntary_ctxt_switches:\t(\d+)\n"
    rb"nonvoluntary_ctxt_switches:\t(\d+)",
    re.DOTALL,
)
_C_LIBRARY = re.compile(r".*/(libc|libpthread|libstdc\+\+|libc\+\+|libgcc_s|ld)[-.][^/]*|\[vdso\]")
_HARMLESS = re.compile(r"/dev/(null|zero|full|u?random|tty.*|pts/.*|ptmx|console|shm/.*|mqueue/.*)")
# Numbers of futex, nanosleep and clock_nanosleep.
_INNER_CALLS = {"x86_64": ("202", "35", "230"), "aarch64": ("98", "101", "115")}.get(
    platform.machine(), ()
)
_STACK_BYTES = 8192
# Some of Arm's processors sign return addresses, in the bits that addresses leave free.
_ADDRESS = (1 << 48) - 1 if platform.machine() == "aarch64" else (1 << 64) - 1


class _Status(NamedTuple):
    name: bytes
    state: str
    """The letter that ps shows: S sleeps."""
    switches: int
    """How often it has stopped running."""


class Looks:
    """A count of looks, one after the other, at which the threads of this process were at rest."""

    def __init__(self) -> None:
        self.libraries: tuple[str, ...] = ()
        """Beginnings of the paths of the frameworks' libraries; none: no framework is there."""
        self._code: _Code | None = None
        self.restart()

    @property
    def at_rest(self) -> bool:
        """True once all threads were at rest at enough looks."""
        return self._count >= _LOOKS and self._is_closed

    def know(self, *libraries: str) -> None:
        """Add a framework: the beginnings of its libraries' paths."""
        self.libraries += libraries
        self._code = None

    def restart(self) -> None:
        """Begin to count anew."""
        self._count = 0
        self._switches: dict[int, int] = {}
        self._is_closed = False

    def look(self, waiting: Container[int]) -> set[int]:
        """The Python threads that sleep within a framework; by their identity, as ``waiting`` is.

        ``waiting``: the threads that wait for an operation themselves.
        """
        statuses, held = _statuses(), set[int]()
        known = {
            thread.ident: _native_id(thread)
            for thread in threading.enumerate()
            if not isinstance(thread, threading._DummyThread)
        }
        for thread, runs_script in _run_script().items():
            if thread == threading.get_ident() or thread in waiting:
                continue
            status = statuses.get(known.get(thread, 0))
            if status is None or status.state in "RD":  # a framework calls back; or it runs
                self.restart()
                return set()
            if runs_script and self._is_within(known[thread]):
                held.add(thread)
        pythons = set(known.values())
        others = {
            number: status
            for number, status in statuses.items()
            if number not in pythons and status.name not in _ENGINE_THREADS
        }
        switches = {number: status.switches for number, status in others.items()}
        has_moved = self._count > 0 and switches != self._switches
        if has_moved or any(status.state != "S" for status in others.values()):
            self.restart()
            return held
        self._count, self._switches = self._count + 1, switches
        if self._count >= _LOOKS and not self._is_closed:  # who has not run since is where it was
            numbers = [*others, *(known[thread] for thread in held)]
            self._is_closed = all(map(_waits_inside, numbers)) and not _has_device()
        return held

    def _is_within(self, number: int) -> bool:
        """Return whether a thread, by the system's number, sleeps in a framework's library."""
        if self._code is None:
            self._code = _Code()
        call = _call_of(number)
        if call is None:
            return False
        try:
            with open("/proc/self/mem", "rb", buffering=0) as memory:
                stack = os.pread(memory.fileno(), _STACK_BYTES, int(call[-2], 16))
        except OSError:
            return False
        for word in memoryview(stack[: len(stack) // 8 * 8]).cast("Q"):
            file_name = self._code.file_of(word & _ADDRESS)
            if file_name is not None and not _C_LIBRARY.fullmatch(file_name):
                return file_name.startswith(self.libraries)
        return False


def _run_script() -> dict[int, bool]:
    """Return which Python threads run the script, by their identity.

    The frames go before anything else is done: who holds one keeps all that its function has named
    alive, tensors too, also when the function has returned meanwhile.
    """
    main = threading.main_thread().ident
    return {
        thread: thread == main or script_frame(frame) is not None
        for thread, frame in sys._current_frames().items()
    }


class _Code:
    """Which file each piece of code in memory is from."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._pieces: list[tuple[int, str]] = []  # the end, and the file
        with open("/proc/self/maps") as file:
            for line in file:
                place, rights, _, _, _, *name = line.rstrip("\n").split(None, 5)
                if "x" in rights:
                    begin, end = (int(each, 16) for each in place.split("-"))
                    self._begins.append(begin)
                    self._pieces.append((end, name[0] if name else ""))

    def file_of(self, address: int) -> str | None:
        """The file of the code at ``address``; "" for code that was made here, None for no code."""
        at = bisect.bisect_right(self._begins, address) - 1
        if at < 0 or address >= self._pieces[at][0]:
            return None
        return self._pieces[at][1]


def _native_id(thread: threading.Thread) -> int:
    # Python keeps the parent's for the main thread of a child.
    return os.getpid() if thread is threading.main_thread() else thread.native_id or 0


def _statuses() -> dict[int, _Status]:
    """Return the status of all threads, by the system's numbers; {} if it does not tell."""
    found = {}
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/status", "rb") as file:
                match = _STATUS.search(file.read())
        except OSError:  # it has ended
            continue
        if match is None:
            return {}
        name, state, *switches = match.groups()
        found[int(number)] = _Status(name, state.decode(), sum(map(int, switches)))
    return found


def _call_of(number: int) -> list[str] | None:
    """The system call that a thread waits in: its number, six arguments, stack and place in code.

    None: it runs, or the system does not tell.
    """
    try:
        with open(f"/proc/self/task/{number}/syscall") as file:
            fields = file.read().split()
    except OSError:
        return None
    return fields if len(fields) == 9 else None


def _waits_inside(number: int) -> bool:
    """Return whether a thread waits only for another one, or for time to pass."""
    call = _call_of(number)
    return call is not None and call[0] in _INNER_CALLS


def _has_device() -> bool:
    """Return whether a device is open that may compute while all threads sleep: a GPU."""
    for number in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # closed meanwhile
            continue
        if path.startswith("/dev/") and not _HARMLESS.fullmatch(path):
            return True
    return False

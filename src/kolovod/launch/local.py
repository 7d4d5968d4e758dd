"""The ranks of a job that run on this host: started, watched and ended here.

Each rank is a session of its own, dies with the process that started it (``orphan_reaper``), and
writes into pipes (``output``). Used by the launcher for its own host, by an agent for another one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from kolovod import blame
from kolovod.coordination import record_file
from kolovod.launch import breakpoints, orphan_reaper
from kolovod.launch.death import Death, ended_child, reported
from kolovod.launch.output import OutputPump
from kolovod.rendezvous.rank_environment import (
    COORDINATOR,
    thread_limits,
    usable_cores,
    without_mpi_variables,
)

__all__ = [
    "MAY_RUN_ON_CODE",
    "PAYLOAD_FD",
    "RESULT_FD",
    "Ended",
    "HostRanks",
    "Order",
    "Start",
    "memory_file",
    "rank_name",
    "read_memory_file",
    "reserved_port",
    "signal_name",
    "write_memory_file",
]

GRACE_S = 5.0  # from SIGTERM to SIGKILL
_HEARD_WHEN_CONTINUED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
_SWEEP_GRACE_S = 1.0  # the same, for what the ranks have left behind
MAY_RUN_ON_CODE = 255  # as ssh's own: of a job or a rank that nobody saw end
_CANNOT_START_CODE = 126  # as a shell's
PAYLOAD_FD, RESULT_FD = "KOLOVOD_PAYLOAD_FD", "KOLOVOD_RESULT_FD"


@dataclass(frozen=True)
class Order:
    """A rank that is to be started."""

    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    """Variables over those of the process that starts it."""
    beside: int = 0
    """How many ranks run on the host, to share its cores; 0: those that are started with it."""
    has_input: bool = False
    """It reads what this process could; others find nothing to read."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    rank: int
    pid: int
    death: Death | None
    """The proof that it has ended; None: it may run on, since nobody saw it end (``lost``)."""
    host: str = ""
    """The host where it ran; "" where all run on one host."""
    lost: str = ""
    """Why it counts as ended without a proof: nobody knows what its host does; "" with one."""
    given_up: str = ""
    """Not empty: a signal of the launcher has ended it; why."""
    seen: str = ""
    """Not empty: how it ended, in the words of a scheduler that tells no code."""
    result: bytes = b""
    """What it has left in the file that a job with a payload gives it."""
    blames: int | None = None
    """The rank whose failure it says was the cause of its own (``blame``)."""
    record: bytes | None = b""
    """What a member of an elastic job has left in its file (``record_file``); None: nobody
    could read it."""
    time: float = 0.0
    """``time.monotonic()`` of the launcher; of a lost one, of its host's last sign of life."""

    def __post_init__(self) -> None:
        """Raises AssertionError for an end that is neither proven nor lost, or both."""
        if (self.death is None) != bool(self.lost):
            raise AssertionError(f"rank {self.rank} ended by {self.death}, lost: {self.lost!r}")

    @property
    def code(self) -> int:
        """Its exit code, or minus the number of the signal that killed it; 255: it is lost."""
        return MAY_RUN_ON_CODE if self.death is None else self.death.code

    @property
    def exit_code(self) -> int:
        """The exit code as a shell counts: 128 plus the signal's number."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def name(self) -> str:
        """A name for messages, such as "rank 3 on host b (pid 17)"."""
        return rank_name(self.rank, self.host, self.pid)

    @property
    def cause(self) -> str:
        """The words that complete "rank 3 ..."."""
        if self.lost:
            return f"is lost: {self.lost}"
        if self.given_up:
            return f"was killed by the launcher: {self.given_up}"
        if self.seen:
            return f"has ended: {self.seen}"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        hint = ": kill -9, or the system was out of memory" if -self.code == signal.SIGKILL else ""
        return f"was killed by signal {-self.code} ({signal_name(-self.code)}{hint})"


class Start:
    """A rank that is being started: ``run`` does what may take long, wherever it is called.

    ``HostRanks.prepare`` returns it, and ``HostRanks.add`` takes it. A process is killed with the
    *thread* that has called ``run`` (PR_SET_PDEATHSIG, see prctl(2)), so that one must last as
    long.
    """

    def __init__(self, rank: int, popen: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.rank = rank
        self.process: subprocess.Popen[bytes] | None = None
        self.error: OSError | None = None
        self._popen = popen

    def run(self) -> None:
        """Start its process, and wait until it executes; a file server may take its time."""
        try:
            self.process = self._popen()
        except OSError as error:
            self.error = error


class HostRanks:
    """Ranks on this host. ``close`` leaves nothing of them behind.

    ``sink`` is called with (rank, "stdout" or "stderr", bytes) on a thread of its own; ``popen``
    starts a rank, with the arguments and the result of ``subprocess.Popen``.
    """

    def __init__(
        self,
        sink: Callable[[int, str, bytes], None],
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> None:
        outer = os.environ.get(orphan_reaper.MARK_NAME)
        self._mark = secrets.token_hex(16)
        self._marks = f"{outer},{self._mark}" if outer else self._mark
        self._pump = OutputPump(sink)
        self._port = reserved_port()
        self._popen = popen
        self._watcher: subprocess.Popen[bytes] | None = None
        self._watching = threading.Lock()
        self._starting: dict[int, list[int]] = {}  # signals that came meanwhile
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._running: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._payload = -1
        self._results: dict[int, int] = {}
        self._blame: dict[int, int] = {}
        self._records: dict[int, int] = {}
        self._untold: list[Ended] = []

    @property
    def torch_port(self) -> int:
        """A port for a server that a rank may start; free, and kept so."""
        port: int = self._port.getsockname()[1]
        return port

    def start(self, orders: Sequence[Order], payload: bytes | None = None) -> None:
        """Start ranks. With a ``payload`` each finds it, and a file for its result, in memory.

        The descriptors are in KOLOVOD_PAYLOAD_FD and KOLOVOD_RESULT_FD. May be called again, with
        other numbers in the place of ranks.
        """
        for start in self.prepare(orders, payload):
            start.run()
            if start.error is not None:
                raise start.error
            self.add(start)

    def prepare(self, orders: Sequence[Order], payload: bytes | None = None) -> list[Start]:
        """Start ranks as ``start`` does, for who must not wait, in three steps.

        They are this one, ``Start.run`` of each, and ``add``.
        """
        if payload is not None:
            before, self._payload = self._payload, memory_file(payload)
            if before >= 0:
                os.close(before)
        return [self._prepare(order, order.beside or len(orders)) for order in orders]

    def _prepare(self, order: Order, ranks: int) -> Start:
        environment = {"PYTHONUNBUFFERED": "1", **without_mpi_variables(os.environ)}
        environment.update(order.environment)
        environment.update(thread_limits(environment, ranks, usable_cores()))
        environment[orphan_reaper.MARK_NAME] = self._marks
        if not order.has_input:
            environment.setdefault("PYTHONBREAKPOINT", breakpoints.HOOK)
        self._blame[order.rank], environment[blame.VARIABLE] = blame.new_file()
        if COORDINATOR in order.environment:
            self._records[order.rank], environment[record_file.VARIABLE] = record_file.new_file()
        given: list[int] = []
        if self._payload >= 0:
            result = self._results[order.rank] = memory_file(b"")
            given = [self._payload, result]
            environment |= {PAYLOAD_FD: str(self._payload), RESULT_FD: str(result)}
        self._starting[order.rank] = []

        def popen() -> subprocess.Popen[bytes]:
            self._watch()
            return self._popen(
                orphan_reaper.exec_command(list(order.command)),
                stdin=None if order.has_input else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=environment,
                pass_fds=given,
            )

        return Start(order.rank, popen)

    def _watch(self) -> None:
        """Have a process that ends the ranks if this one is killed."""
        with self._watching:
            if self._watcher is None:
                self._watcher = subprocess.Popen(
                    orphan_reaper.watch_command(self._mark),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )

    def add(self, start: Start) -> None:
        """Take a rank that got a process, to hear of its output and end; or could get none."""
        rank, process = start.rank, start.process
        signals = self._starting.pop(rank)
        if process is None:
            why = f"it could not be started: {start.error}"
            never = reported(_CANNOT_START_CODE)
            self._untold.append(Ended(rank, 0, never, seen=why, time=time.monotonic()))
            self._forget(rank)
            return
        self._processes[rank] = process
        self._running.add(rank)
        with contextlib.suppress(OSError):  # without pidfds they are asked by and by
            self._pidfds[rank] = os.pidfd_open(process.pid)
        for name in ("stdout", "stderr"):
            pipe: IO[bytes] | None = getattr(process, name)
            if pipe is None:
                raise AssertionError(f"rank {rank} has no {name} pipe")
            self._pump.add(rank, name, pipe)
        self._pump.start()
        for signum in signals:
            self.send(signum, [rank])

    @property
    def starting(self) -> frozenset[int]:
        """The ranks between ``prepare`` and ``add``."""
        return frozenset(self._starting)

    @property
    def running(self) -> frozenset[int]:
        """The ranks that were not seen to end."""
        return frozenset(self._running)

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank."""
        processes = self._processes.copy()  # others than the job's thread ask, too
        return {rank: process.pid for rank, process in processes.items()}

    def fds(self) -> list[int]:
        """Return descriptors that are readable when ``collect`` has something to tell.

        They are those of ranks that run.
        """
        return [fd for rank, fd in self._pidfds.items() if rank in self._running]

    def stopped(self) -> set[int]:
        """Return the ranks that run, but whose process is stopped (SIGSTOP)."""
        return {
            rank for rank in self._running if orphan_reaper.is_stopped(self._processes[rank].pid)
        }

    def needs_polling(self) -> bool:
        """Return whether the system has no pidfds, so that ``collect`` must be called by and by."""
        return any(rank not in self._pidfds for rank in self._running)

    def collect(self) -> list[Ended]:
        """Return the ends since the last call; deaths by signal first: they cause the others."""
        ended, self._untold = self._untold, []
        for rank in self._running:
            process = self._processes[rank]
            death = ended_child(process.pid)
            if death is not None:
                found = read_memory_file(self._results[rank]) if rank in self._results else b""
                blames = blame.read(self._blame[rank])
                record = record_file.read(self._records[rank]) if rank in self._records else b""
                now = time.monotonic()
                end = Ended(
                    rank, process.pid, death, result=found, blames=blames, record=record, time=now
                )
                ended.append(end)
        self._running -= {end.rank for end in ended}
        for end in ended:
            self._forget(end.rank)
        return sorted(ended, key=lambda end: (end.code >= 0, end.rank))

    def _forget(self, rank: int) -> None:
        """Close its files: of an elastic job many may come and go."""
        for files in (self._pidfds, self._results, self._blame, self._records):
            fd = files.pop(rank, -1)
            if fd >= 0:
                os.close(fd)

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to every process of these ranks, also to what they have started.

        One that is stopped goes on, so that it can end by the signal; one that is being started
        gets it then. ``ranks``: only to these, and to what is in their sessions.
        """
        for rank, signals in self._starting.copy().items():
            if ranks is None or rank in ranks:
                signals.append(signum)
        mark, sessions = self._mark, self._sessions()
        if ranks is not None:
            begun = [self._processes[rank] for rank in ranks if rank in self._processes]
            mark, sessions = "", [process.pid for process in begun]
        orphan_reaper.kill_job(mark, sessions, signum)
        if signum in _HEARD_WHEN_CONTINUED:
            orphan_reaper.kill_job(mark, sessions, signal.SIGCONT)

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        if self._port.fileno() < 0:
            return
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + _SWEEP_GRACE_S
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + GRACE_S
        while self._left() and time.monotonic() < deadline:
            self.send(signal.SIGKILL)
            time.sleep(0.01)
        self._untold = self.collect()
        self._running.clear()
        self._pump.finish()
        self._port.close()
        for process in self._processes.values():
            process.wait()
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
        made = (self._results, self._blame, self._records)
        files = *(fd for by_rank in made for fd in by_rank.values()), self._payload
        for fd in (*self._pidfds.values(), *files):
            if fd >= 0:
                os.close(fd)

    def _sessions(self) -> list[int]:
        return [process.pid for process in self._processes.copy().values()]

    def _left(self) -> bool:
        return bool(orphan_reaper.job_processes(self._mark, self._sessions()))


def memory_file(content: bytes) -> int:
    """Make an anonymous file with ``content``; return the descriptor."""
    fd = os.memfd_create("kolovod-ranks")
    try:
        write_memory_file(fd, content)
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_memory_file(fd: int, content: bytes) -> None:
    """Write all of it, however large."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def read_memory_file(fd: int) -> bytes:
    """Read all of it, by position: several processes share the open file, and so its offset."""
    size = os.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:
        data += os.pread(fd, size - len(data), len(data))
    return bytes(data)


def reserved_port() -> socket.socket:
    """Reserve a port for a server of a rank: nobody gets it by chance while this socket is open.

    Since nobody listens here, a server that sets SO_REUSEADDR, as torch.distributed's does, can.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def rank_name(rank: int, host: str, pid: int) -> str:
    """Return a name such as "rank 3 on host b (pid 17)"; ``host``: "" where all run on one."""
    return f"rank {rank}{f' on host {host}' if host else ''} (pid {pid})"


def signal_name(signum: int) -> str:
    """Return a signal's name, such as SIGTERM."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"real-time signal {signum}"

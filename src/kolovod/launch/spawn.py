"""Starts the ranks of a job on this host and sees them through to the end.

Each rank is a session of its own, dies with the launcher (``guard``), and writes into pipes
(``output``). The first rank that fails ends the job: SIGTERM to all of it, SIGKILL after a grace.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, TextIO

from kolovod.launch import guard
from kolovod.launch.auth import new_secret
from kolovod.launch.output import OutputPump
from kolovod.launch.place import Place, local_and_cross, thread_limits, usable_cores
from kolovod.launch.store import Store

__all__ = ["Ended", "Job", "JobOptions", "Outcome"]

GRACE_S = 5.0  # from SIGTERM to SIGKILL
_SWEEP_GRACE_S = 1.0  # the same, for what the ranks have left behind
_POLL_WITHOUT_PIDFD_S = 0.05


@dataclass(frozen=True)
class JobOptions:
    """What a job looks like from outside."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, over the launcher's own."""
    timestamps: bool = False
    output_dir: Path | None = None
    """Also write each rank's output, unmarked, to rank.N/stdout and rank.N/stderr below it."""
    keep_going: bool = False
    hosts: Sequence[str] = ()
    """The host of each rank, if not all the same; see ``kolovod run --label-hosts``."""
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    """Where the ranks' output goes; None: nowhere."""
    report: Callable[[str], None] = lambda text: None
    """Called with each thing that the launcher itself has to say."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    rank: int
    pid: int
    code: int
    """Its exit code, or minus the number of the signal that killed it."""

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 plus the signal's number."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        """What completes "rank 3 ..."."""
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        hint = ": kill -9, or the system was out of memory" if -self.code == signal.SIGKILL else ""
        return f"was killed by signal {-self.code} ({_signal_name(-self.code)}{hint})"


@dataclass
class Outcome:
    """How a job went."""

    ended: list[Ended] = field(default_factory=list)
    """In the order of their ends."""
    first_failure: Ended | None = None
    """The first rank that failed by itself, not because it was told to end."""
    stopped_by: int | None = None
    """The signal that the launcher was sent."""
    late: tuple[int, ...] = ()
    """Ranks that were still at work at the job's deadline."""

    def exit_code(self, keep_going: bool) -> int:
        """What the launcher should exit with."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first_failure is None or (keep_going and any(e.code == 0 for e in self.ended)):
            return 0
        return self.first_failure.exit_code


class Job:
    """``size`` ranks on this host. A context manager: leaving it leaves nothing behind."""

    def __init__(self, size: int, options: JobOptions) -> None:
        self.size = size
        self.options = options
        outer = os.environ.get(guard.MARK_NAME)
        self._mark = secrets.token_hex(16)
        self._marks = f"{outer},{self._mark}" if outer else self._mark
        self._secret = new_secret()
        self._store = Store(self._secret, size)
        self._torch_port = _reserved_port()
        stamp = _now if options.timestamps else None
        self._output = OutputPump(stamp)
        self._watcher: subprocess.Popen[bytes] | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._running: set[int] = set()
        self._pidfds: dict[int, int] = {}
        self._signals: list[int] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._kill_at: float | None = None
        self.outcome = Outcome()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        command: Callable[[int], Sequence[str]],
        pass_fds: Callable[[int], Sequence[int]] = lambda rank: (),
    ) -> None:
        """Start every rank: ``command(rank)``, which inherits ``pass_fds(rank)``."""
        self._watcher = subprocess.Popen(
            guard.watch_command(self._mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        base = {**os.environ, **self.options.environment}
        base = {
            "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
            **base,
            **thread_limits(base, self.size, usable_cores()),
            guard.MARK_NAME: self._marks,
        }
        for rank in range(self.size):
            hosts = self.options.hosts or ["localhost"] * self.size
            place = Place(
                rank,
                self.size,
                *local_and_cross(hosts, rank),
                host=hosts[rank],
                store=self._store.address,
                secret=self._secret,
            )
            told = place.torch_environment(self._torch_port.getsockname()[1])
            process = subprocess.Popen(
                guard.exec_command(list(command(rank))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**base, **told, **self.options.environment, **place.environment()},
                pass_fds=tuple(pass_fds(rank)),
            )
            self._processes[rank] = process
            self._running.add(rank)
            with contextlib.suppress(OSError):  # without pidfds they are asked by and by
                self._pidfds[rank] = os.pidfd_open(process.pid)
            self._attach_output(rank, process)
        self._output.start()
        self._store.start()

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._processes[rank].pid

    def signal(self, signum: int) -> None:
        """From a signal handler: pass ``signum`` on to the job and end it. Twice: kill it."""
        self._signals.append(signum)
        os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until every rank has ended, or end them all after ``timeout_s``.

        On the deadline the ranks are sent SIGABRT first, so that those with faulthandler enabled
        print where they are.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        for fd in (self._bell, *self._pidfds.values()):
            poll.register(fd, select.POLLIN)
        while self._running:
            for fd, _ in poll.poll(self._poll_ms(deadline)):
                if fd == self._bell:
                    os.eventfd_read(self._bell)
                else:
                    poll.unregister(fd)
            self._collect()
            self._obey_signals()
            now = time.monotonic()
            if deadline is not None and now >= deadline and self._running:
                deadline = None
                self.outcome.late = tuple(sorted(self._running))
                self._stop(signal.SIGABRT)
            if self._kill_at is not None and now >= self._kill_at and self._running:
                self._kill_at = now + 1.0
                self._send(signal.SIGKILL)
        return self.outcome

    def tail(self, rank: int, stream_name: str) -> str:
        """The last lines of a rank's "stdout" or "stderr"; after ``close``."""
        return self._output.tail(rank, stream_name)

    def close(self) -> None:
        """End whatever is left of the job, and release everything. Idempotent."""
        if self._bell < 0:
            return
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + _SWEEP_GRACE_S
        while self._left() and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + GRACE_S
        while self._left() and time.monotonic() < deadline:
            self._send(signal.SIGKILL)
            time.sleep(0.01)
        self._output.finish()
        self._store.close()
        self._torch_port.close()
        for process in self._processes.values():
            process.wait()
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()
            self._watcher.wait()
        for fd in (self._bell, *self._pidfds.values()):
            os.close(fd)
        self._bell = -1

    def _attach_output(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        consoles = {"stdout": self.options.stdout, "stderr": self.options.stderr}
        for name, console in consoles.items():
            pipe: IO[bytes] | None = getattr(process, name)
            if pipe is None:
                raise AssertionError(f"rank {rank} has no {name} pipe")
            file: IO[bytes] | None = None
            if self.options.output_dir is not None:
                width = len(str(self.size - 1))
                folder = self.options.output_dir / f"rank.{rank:0{width}d}"
                folder.mkdir(parents=True, exist_ok=True)
                file = open(folder / name, "wb")  # noqa: SIM115 - closed by the pump
            self._output.add(rank, name, pipe, console, file)

    def _poll_ms(self, deadline: float | None) -> float | None:
        times = [t - time.monotonic() for t in (deadline, self._kill_at) if t is not None]
        if len(self._pidfds) < self.size:
            times.append(_POLL_WITHOUT_PIDFD_S)
        return max(0.0, min(times)) * 1000 + 1 if times else None

    def _collect(self) -> None:
        """Note who has ended since the last time; deaths by signal first: they cause the others."""
        ended = []
        for rank in self._running:
            process = self._processes[rank]
            # The process stays a zombie until the end of the job: its pid, which is also the number
            # of its session, cannot be given to another process meanwhile.
            flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
            result = os.waitid(os.P_PID, process.pid, flags)
            if result is not None:
                killed = result.si_code != os.CLD_EXITED
                code = -result.si_status if killed else result.si_status
                ended.append(Ended(rank, process.pid, code))
        for end in sorted(ended, key=lambda end: (end.code >= 0, end.rank)):
            self._running.discard(end.rank)
            self.outcome.ended.append(end)
            self._store.mark_dead(end.rank, end.cause)
            if end.code != 0 and self._kill_at is None:
                self._note_failure(end)

    def _note_failure(self, end: Ended) -> None:
        if self.outcome.first_failure is None:
            self.outcome.first_failure = end
        text = f"rank {end.rank} (pid {end.pid}) {end.cause}"
        if self.options.keep_going:
            self.options.report(f"{text}; the others go on")
            return
        left = f"; ending the other {len(self._running)}" if self._running else ""
        self.options.report(text + left)
        self._stop(signal.SIGTERM)

    def _obey_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            name = _signal_name(signum)
            if self.outcome.stopped_by is None:
                self.outcome.stopped_by = signum
                self.options.report(f"{name}: ending {len(self._running)} ranks (again: kill them)")
                self._stop(signum)
            else:
                self.options.report(f"{name} again: killing {len(self._running)} ranks")
                self._stop(signal.SIGKILL)

    def _stop(self, signum: int) -> None:
        self._send(signum)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S

    def _sessions(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def _send(self, signum: int) -> None:
        guard.kill_job(self._mark, self._sessions(), signum)

    def _left(self) -> bool:
        return bool(guard.job_processes(self._mark, self._sessions()))


def _reserved_port() -> socket.socket:
    """A port for a server that a rank may start: nobody gets it by chance while this is open.

    Since nobody listens here, a server that sets SO_REUSEADDR, as torch.distributed's does, can.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"real-time signal {signum}"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def report_to_stderr(text: str) -> None:
    """Say it as the launcher, on standard error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"kolovod: {text}", file=sys.stderr, flush=True)

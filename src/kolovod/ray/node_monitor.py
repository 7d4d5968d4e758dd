"""An actor that keeps what must outlive a rank on its node.

That is its output, the rank that it blames, and what it had agreed to. Ray tells that an actor has
died, and nothing that it had to say. So on each node of a job an actor that needs no CPU holds the
files that the launcher of other jobs holds (``launch.local``).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import ray

from kolovod import blame
from kolovod.coordination import record_file
from kolovod.launch import orphan_reaper
from kolovod.launch.local import reserved_port
from kolovod.launch.output import OutputPump
from kolovod.ray.answers import answer

__all__ = ["NodeMonitor", "Kept"]

_KILLED_S = 5.0
"""For the kernel to end a process that was killed."""


@dataclass(frozen=True)
class Kept:
    """The files' contents of a process that has ended, as in ``local.Ended``."""

    blames: int | None
    record: bytes


@dataclass
class _Files:
    blame: int
    record: int
    pipes: list[int] = field(default_factory=list)
    """Our copies of the ends that the rank writes to, until it has them."""
    pidfd: int = -1
    pid: int = 0


class NodeMonitor:
    """The actor. It has several threads."""

    def __init__(self, launcher: Any) -> None:
        """``launcher``: the actor that takes what ranks write (``Launcher.written``).

        None: nobody asks to keep output (``prepare``).
        """
        self._launcher = launcher
        self._lock = threading.Lock()
        self._files: dict[int, _Files] = {}
        self._passed: dict[tuple[int, str], int] = {}  # bytes, by process and stream
        self._port = reserved_port()
        self._pump = OutputPump(self._pass_on)

    def reached(self) -> tuple[str, int]:
        """Return the node's address, and a port that is kept free for a server of a rank's."""
        port: int = self._port.getsockname()[1]
        return ray.util.get_node_ip_address(), port

    def _pass_on(self, number: int, stream: str, data: bytes) -> None:
        start = self._passed.get((number, stream), 0)
        with contextlib.suppress(ray.exceptions.RayActorError):  # which ends this one, too
            answer(self._launcher.written, number, stream, start, data)
        self._passed[number, stream] = start + len(data)

    def prepare(
        self, number: int, *, keeps_output: bool = True
    ) -> tuple[dict[str, str], list[str]]:
        """Make files for a process that is to start; return its variables, and two pipes' paths.

        It writes its output to these; ``keeps_output``: whether there are pipes.
        """
        variables: dict[str, str] = {}
        blame_fd, variables[blame.VARIABLE] = blame.new_file()
        record_fd, variables[record_file.VARIABLE] = record_file.new_file()
        files = _Files(blame_fd, record_fd)
        with self._lock:
            self._files[number] = files
            if not keeps_output:
                return variables, []
            for name in ("stdout", "stderr"):
                source, sink = os.pipe2(os.O_CLOEXEC)
                self._pump.add(number, name, os.fdopen(source, "rb", buffering=0))
                files.pipes.append(sink)
        self._pump.start()
        return variables, [f"/proc/{os.getpid()}/fd/{sink}" for sink in files.pipes]

    def watch(self, number: int, pid: int) -> None:
        """Note that it runs, and has the pipes."""
        with self._lock:
            files = self._files[number]
            files.pid = pid
            with contextlib.suppress(OSError):  # it has ended
                files.pidfd = os.pidfd_open(pid)
            self._close_pipes(files)

    def bury(self, number: int, grace_s: float) -> Kept:
        """Return what it has left, once it has ended; it is killed after ``grace_s``.

        One that was not prepared has left nothing: the call that should have done that has failed.
        """
        with self._lock:
            files = self._files.pop(number, None)
            if files is None:
                return Kept(None, b"")
            self._close_pipes(files)
        if files.pidfd >= 0:
            ended = select.poll()
            ended.register(files.pidfd, select.POLLIN)
            if not ended.poll(grace_s * 1000):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(files.pidfd, signal.SIGKILL)
                ended.poll(_KILLED_S * 1000)
            os.close(files.pidfd)
        try:
            return Kept(blame.read(files.blame), record_file.read(files.record))
        finally:
            os.close(files.blame)
            os.close(files.record)

    @staticmethod
    def _close_pipes(files: _Files) -> None:
        while files.pipes:
            os.close(files.pipes.pop())

    def send(self, signum: int, numbers: Collection[int]) -> None:
        """Send a signal to those of these that run; one that is stopped goes on, to hear it."""
        with self._lock:
            for number in numbers:
                files = self._files.get(number)
                if files is not None and files.pidfd >= 0:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(files.pidfd, signum)
                        signal.pidfd_send_signal(files.pidfd, signal.SIGCONT)

    def stopped(self, numbers: Collection[int]) -> set[int]:
        """Return those of these numbers whose processes are stopped."""
        with self._lock:
            pids = {n: self._files[n].pid for n in numbers if n in self._files}
        return {number for number, pid in pids.items() if pid and orphan_reaper.is_stopped(pid)}

    def close(self) -> None:
        """Kill what is left; return when all that was written has been passed on."""
        self.send(signal.SIGKILL, list(self._files))
        with self._lock:
            for files in self._files.values():
                self._close_pipes(files)
        self._pump.finish()
        self._port.close()

"""The viewer of an elastic job that a daemon has: its output, to its end, and how it gets on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kolovod.launch import job_folders
from kolovod.launch.agent_messages import FrameReader, FrameWriter, split_output
from kolovod.launch.background import start_in_background
from kolovod.launch.heard_signals import PASSED_ON_ONLY
from kolovod.launch.job_folders import JobFolder
from kolovod.launch.status import Status, status_of
from kolovod.net.unix_sockets import peer_process
from kolovod.notices import report_to

__all__ = ["PASSED_ON", "READ_BYTES", "attach", "show"]

PASSED_ON = (signal.SIGINT, signal.SIGTERM, *PASSED_ON_ONLY)
READ_BYTES = 1 << 16
_EXIT_UNKNOWN = 128 + signal.SIGHUP
"""Of a viewer that cannot see how the job ends: another one shows it, or no daemon is left."""
_DEATH_S = 1.0
"""From the end of a process's connections to its own, at most."""
_AGAIN_S = 30.0
"""For the next daemon to come."""
_ELSEWHERE_S = 60.0
"""The same, where it must ask other hosts."""
_STARTS = 3
"""Of daemons in a row that end within that time."""


def attach(name: str | None) -> int:
    """Show a job's output from where it was shown last, to its end; return its exit code.

    ``name``: None for the only job of this user on this host. Raises InvalidArgumentError for one
    that is not there.
    """
    folder = job_folders.find(name)
    if folder.exit_code() is None and not folder.is_kept():
        _start_daemon(folder)
    kept = _wait_for_daemon(folder)
    with status_of("auto", sys.stdout, sys.stderr, os.environ) as status:
        return _end_of(folder, status) if kept is None else show(*kept, status)


def show(connection: socket.socket, folder: JobFolder | None, status: Status, pid: int = 0) -> int:
    """Show what a daemon says, and the one after it; return the exit code.

    ``folder``: the job's as that daemon has written it; None: it says so itself, and is ``pid``,
    which no socket pair tells.
    """
    starts = _STARTS
    while True:
        view = _View(connection, status, pid)
        began_s = time.monotonic()
        try:
            return view.show()
        except EOFError:
            folder = folder or view.folder
        starts = starts - 1 if time.monotonic() < began_s + _ELSEWHERE_S else _STARTS
        if folder is None:
            text = f"the process that kept the job (pid {pid}) was killed, and so the job"
            report_to(status.stderr, text)
            return 128 + signal.SIGKILL
        if view.daemon_lives():
            report_to(
                status.stderr,
                f"job {folder.name} is shown by another kolovod attach now; it goes on",
            )
            return _EXIT_UNKNOWN
        kept = _wait_for_daemon(folder, may_start=starts > 0)
        if kept is None:
            return _end_of(folder, status)
        report_to(
            status.stderr,
            f"the process that kept the job (pid {folder.pid}) was killed; another one goes on",
        )
        connection, folder = kept
        pid = 0


def _wait_for_daemon(
    folder: JobFolder, *, may_start: bool = True
) -> tuple[socket.socket, JobFolder] | None:
    """Return a connection to the job's daemon, and what it has written of the job.

    One is started where no agent on this host could, and other hosts have ranks. None: there is
    none, or the job has ended.
    """
    deadline = time.monotonic() + _AGAIN_S
    while time.monotonic() < deadline and folder.exit_code() is None:
        now = job_folders.read(folder.path)
        if now is not None:
            with contextlib.suppress(OSError):
                return now.connect(), now
        # Who has removed the folder has not ended the job: its agent makes it anew.
        if folder.path.exists() and not folder.is_kept() and not folder.has_agent():
            if not (may_start and folder.hosts()):
                break
            may_start = False
            deadline = time.monotonic() + _ELSEWHERE_S
            _start_daemon(folder)
        time.sleep(0.02)
    return None


def _start_daemon(folder: JobFolder) -> None:
    """Start the next one, and wait until it is there, or has failed."""
    process = start_in_background(folder.again)
    deadline = time.monotonic() + _ELSEWHERE_S
    while not folder.is_kept() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def _end_of(folder: JobFolder, status: Status) -> int:
    """Show the end of a job that has no daemon to say it; return the exit code."""
    code = folder.exit_code()
    if code is None:
        text, code = _without_daemon(folder)
        report_to(status.stderr, text)
        return code
    for stream in ("stdout", "stderr"):
        try:
            _print(status, stream, folder.left(stream))
        except OSError:
            report_to(status.stderr, f"the rest of job {folder.name} was shown elsewhere")
    folder.remove()
    return code


def _without_daemon(folder: JobFolder) -> tuple[str, int]:
    """Return a text about a job that has neither ended nor a daemon, and the exit code."""
    if folder.has_agent():
        text = (
            f"job {folder.name} goes on without a launcher, and none could be started: "
            f"kolovod attach {folder.name} tries again"
        )
        return text, _EXIT_UNKNOWN
    if hosts := folder.hosts():
        text = (
            f"the processes that kept job {folder.name} were killed, and its ranks on this host "
            f"with them. Those on {', '.join(hosts)} go on without a launcher as long as they can, "
            "and nobody sees how they end; to end them, end their kolovod.launch.agent there"
        )
        return text, _EXIT_UNKNOWN
    text = f"the processes that kept job {folder.name} were killed, and so the job"
    return text, 128 + signal.SIGKILL


def _print(status: Status, stream: str, text: str) -> None:
    console = status.stdout if stream == "stdout" else status.stderr
    if console is None:
        return
    with contextlib.suppress(OSError, ValueError):  # who reads it is gone
        console.write(text)
        console.flush()


class _View:
    """One view of a job: a connection to its daemon."""

    def __init__(self, connection: socket.socket, status: Status, pid: int) -> None:
        self.folder: JobFolder | None = None
        """Where the job is found if the daemon ends."""
        self._connection = connection
        self._daemon = -1
        with contextlib.suppress(OSError):  # it has ended, or is in another pid namespace
            self._daemon = os.pidfd_open(pid or peer_process(connection)[0])
        self._writer = FrameWriter(connection.fileno())
        self._signals: list[int] = []
        self._status = status
        self._progress = ""

    def show(self) -> int:
        """Show output to the job's end; return its exit code.

        Raises EOFError if the daemon hangs up.
        """
        reader = FrameReader(prelude=False)
        shown = 0
        if self._status.is_on:
            self._status.start(self._ask_progress)
        closing = contextlib.closing(self._writer)  # first: progress is asked for on a thread
        with self._connection, closing, self._hearing_signals() as bell:
            poll = select.poll()
            for fd in (self._connection.fileno(), bell):
                poll.register(fd, select.POLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll()]
                if bell in ready:
                    os.eventfd_read(bell)
                    while self._signals:
                        self._say({"signal": self._signals.pop(0)})
                if self._connection.fileno() not in ready:
                    continue
                for kind, body in reader.feed(self._receive()):
                    if kind == b"O":
                        _, stream, data = split_output(body)
                        _print(self._status, stream, data.decode())
                        shown += 1
                        continue
                    said = json.loads(body)
                    if "folder" in said:
                        self.folder = job_folders.read(Path(said["folder"]))
                    self._progress = said.get("progress", self._progress)
                    if "exit" in said:
                        self._say({"told": True})
                        return int(said["exit"])
                self._say({"shown": shown})

    def daemon_lives(self) -> bool:
        """Return whether the daemon is still there a moment after it has hung up."""
        if self._daemon >= 0:
            poll = select.poll()
            poll.register(self._daemon, select.POLLIN)
            return not poll.poll(_DEATH_S * 1000)
        deadline = time.monotonic() + _DEATH_S
        while self.folder is not None and self.folder.is_kept():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    def _ask_progress(self) -> str:
        """Ask for the progress, and return the last answer, on the thread that shows it.

        The next answer will have come when it is asked again.
        """
        self._say({"progress": True})
        return self._progress

    def _receive(self) -> bytes:
        try:
            data = self._connection.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return data

    def _say(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which is read
            self._writer.json(value)

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[int]:
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

        def hear(signum: int, _: object) -> None:
            self._signals.append(signum)
            os.eventfd_write(bell, 1)

        before = {signum: signal.signal(signum, hear) for signum in PASSED_ON}
        try:
            yield bell
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            os.close(bell)

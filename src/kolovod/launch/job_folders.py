"""The folders, on this host, by which this user's jobs that outlive their launcher are found.

A folder for each, named by the process that has begun it, and one for the agent that runs its ranks
(``agent_line``)::

    jobs/NAME/                    in the folder of this user (``runtime_folder``)
      job                         {"command": [text], "began": text, "pid": n, "agent": name,
                                  "again": command line} as JSON
      socket                      the daemon's (``job_daemon``), while it lives
      hosts                       other hosts with ranks of the job, for who finds no daemon
      stdout, stderr, exit_code   of a job that has ended while nobody was attached

Daemon and agent hold a lock on their folders while they live. It says so to processes in other pid
namespaces, too, and keeps systemd-tmpfiles from removing what is older than it likes. If somebody
removes the folders all the same, both make theirs anew. A file system that becomes full ends no
job: the next daemon writes nothing that it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kolovod.core import runtime_folder
from kolovod.core.runtime_folder import is_ours
from kolovod.errors import BootstrapError, CommandArgumentError, HostError
from kolovod.launch.folder_locks import hold, is_held
from kolovod.net.unix_sockets import connect_to, listen_at
from kolovod.printable import printable

__all__ = ["JobFolder", "find", "found", "make", "read", "take_over"]


_RESERVED = 8 * " "
"""In ``exit_code`` until there is one: to overwrite it needs no room."""


@dataclass(frozen=True)
class JobFolder:
    """The folder of one job."""

    path: Path
    command: tuple[str, ...]
    began: str
    """Local time, to the second."""
    pid: int
    """The process id of the daemon, or of one before it where the file system is full."""
    agent: str
    """The name of the agent that runs the ranks."""
    again: tuple[str, ...]
    """The command line that starts another daemon."""

    @property
    def name(self) -> str:
        """The job's name for users."""
        return self.path.name

    def is_kept(self) -> bool:
        """Return whether the daemon is there."""
        return is_held(self.path)

    def has_agent(self) -> bool:
        """Return whether the ranks may run though no daemon is there."""
        return is_held(self.path.parent.parent / "agents" / self.agent)

    def exit_code(self) -> int | None:
        """Return the exit code of a job that has ended with nobody attached.

        None: it goes on, or was killed.
        """
        try:
            return int((self.path / "exit_code").read_text())
        except (OSError, ValueError):
            return None

    def listen(self) -> socket.socket:
        """Return the daemon's socket, which listens."""
        return listen_at(self.path / "socket")

    def connect(self) -> socket.socket:
        """Connect to the daemon. Raises OSError if it is gone."""
        return connect_to(self.path / "socket")

    def close_socket(self) -> None:
        """Remove the socket: nobody finds the daemon from now on. Idempotent."""
        (self.path / "socket").unlink(missing_ok=True)

    def is_found(self) -> bool:
        """Return whether the daemon can be reached by the folder."""
        return (self.path / "socket").exists()

    def make_anew(self) -> socket.socket:
        """Make the folder again after somebody has removed it. Raises OSError, BootstrapError."""
        self._make_anew()
        return self.listen()

    def _make_anew(self) -> None:
        runtime_folder.made("jobs", self.path.name)
        hold(self.path)
        self._write()

    def leave(self, outputs: dict[str, str], code: int) -> None:
        """Write what is shown to who attaches later; of outputs as much as there is room for.

        Where there is none at all nobody can be told, and the job has ended all the same.
        """
        with contextlib.suppress(OSError, BootstrapError):
            if not self.path.exists():
                self._make_anew()
            elif not self._is_written():  # there was no room when the folder was made anew
                self._write()
        for stream, text in outputs.items():
            with contextlib.suppress(OSError):
                (self.path / stream).write_bytes(text.encode(errors="replace"))
        # Into the room that is reserved, if it is: the outputs may have taken all else.
        with contextlib.suppress(OSError):
            fd = os.open(self.path / "exit_code", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:  # which is not truncated
                file.write(str(code))

    def _is_written(self) -> bool:
        """Return whether what ``_write`` writes is there."""
        try:
            return (self.path / "job").exists() and bool((self.path / "exit_code").stat().st_size)
        except OSError:
            return False

    def left(self, stream: str) -> str:
        """Return the output of a stream that ``leave`` has written."""
        return (self.path / stream).read_bytes().decode(errors="replace")

    def note_hosts(self, hosts: Sequence[str]) -> None:
        """Note the other hosts with ranks of the job, for who finds no daemon; if there is room."""
        with contextlib.suppress(OSError):
            (self.path / "hosts").write_text(" ".join(hosts))

    def hosts(self) -> list[str]:
        """Return the hosts that ``note_hosts`` has noted."""
        try:
            return (self.path / "hosts").read_text().split()
        except OSError:
            return []

    def remove(self) -> None:
        """Forget the job."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self) -> None:
        given = {
            "command": self.command,
            "began": self.began,
            "pid": self.pid,
            "agent": self.agent,
            "again": self.again,
        }
        new = self.path / "new"
        new.write_text(json.dumps(given))
        new.rename(self.path / "job")
        (self.path / "exit_code").write_text(_RESERVED)


def make(command: Sequence[str], again: Sequence[str]) -> JobFolder:
    """Make the folder of a job whose daemon is this process, to its end. Raises BootstrapError.

    ``again``: starts another daemon, which is told by a last argument what ``take_over`` needs.
    """
    parent = runtime_folder.made("jobs")
    try:
        path = _free(parent)
        hold(path)
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        agent = f"{path.name}-{os.urandom(8).hex()}"
        told = json.dumps({"path": str(path), "began": began, "agent": agent})
        folder = JobFolder(path, tuple(command), began, os.getpid(), agent, (*again, told))
        folder._write()
    except OSError as error:
        raise HostError(f"{error.filename or parent}: {error.strerror}") from None
    return folder


def _free(parent: Path) -> Path:
    """Make a folder, named by this process if no earlier one with its number has left a job."""
    name, turn = str(os.getpid()), 1
    while True:
        path = parent / (name if turn == 1 else f"{name}-{turn}")
        try:
            path.mkdir(mode=0o700)
            return path
        except FileExistsError:
            before = read(path)
            if before is None or not _is_alive(before):
                shutil.rmtree(path)
            else:
                turn += 1


def take_over(told: str, command: Sequence[str], again: Sequence[str]) -> JobFolder:
    """Be the daemon of a job that has lost its own. Raises BootstrapError if it has not.

    ``told``: the last argument of this daemon, which ``again`` has started (``make``).
    """
    given: dict[str, Any] = json.loads(told)
    path = Path(given["path"])
    runtime_folder.adopt(path.parent.parent)
    runtime_folder.made("jobs", path.name)
    try:
        hold(path)
    except OSError:
        raise HostError(f"job {path.name} has a keeper") from None
    began, agent = str(given["began"]), str(given["agent"])
    mine = JobFolder(path, tuple(command), began, os.getpid(), agent, (*again, told))
    with contextlib.suppress(OSError):  # no room is left: that of the daemon before stays there
        mine._write()
    return mine


def found() -> list[JobFolder]:
    """Return all jobs to attach to, the oldest first. Folders of killed jobs are removed."""
    folders = []
    for path in _paths():
        folder = read(path)
        if folder is None:
            continue  # it is being made, or removed
        if _is_alive(folder) or folder.exit_code() is not None:
            folders.append(folder)
        else:
            folder.remove()
    return sorted(folders, key=lambda folder: (folder.began, folder.name))


def _is_alive(folder: JobFolder) -> bool:
    """Return whether a job may go on.

    Only an agent on another host knows more of what runs there.
    """
    return folder.is_kept() or folder.has_agent() or bool(folder.hosts())


def read(path: Path) -> JobFolder | None:
    """Return the job of that folder; None: it is being made, or removed."""
    try:
        job: dict[str, Any] = json.loads((path / "job").read_text())
        return JobFolder(
            path,
            tuple(job["command"]),
            str(job["began"]),
            int(job["pid"]),
            str(job["agent"]),
            tuple(job["again"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(name: str | None) -> JobFolder:
    """Return the job of that name; None: the only one. Raises InvalidArgumentError."""
    folders = found()
    chosen = [folder for folder in folders if name is None or folder.name == name]
    if len(chosen) == 1:
        return chosen[0]
    if not folders:
        raise CommandArgumentError(
            "no elastic job of this user is on this host (in "
            f"{runtime_folder.runtime_folder() / 'jobs'} there is none)"
        )
    listed = "".join(f"\n  {_line(folder)}" for folder in folders)
    if name is None:
        raise CommandArgumentError(f"name one of these jobs:{listed}")
    raise CommandArgumentError(f"there is no job {name}; there are:{listed}")


def _line(folder: JobFolder) -> str:
    code = folder.exit_code()
    how = "" if code is None else f" (ended with exit code {code})"
    return printable(f"{folder.name}  since {folder.began}  {' '.join(folder.command)}{how}")


def _paths() -> list[Path]:
    parents = [folder / "jobs" for folder in runtime_folder.existing()]
    return [
        path
        for parent in parents
        if is_ours(parent, may_be_missing=False)
        for path in parent.iterdir()
    ]

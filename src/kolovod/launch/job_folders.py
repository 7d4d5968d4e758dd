"""Where the jobs of this user that outlive their launcher are found, on this host.

A folder for each, named by the process that keeps it (``keeper``)::

    TMP/kolovod-UID/jobs/PID/
      job                         {"command": [text], "began": text, "ticks": n} as JSON
      socket                      the keeper's, while it lives
      stdout, stderr, exit_code   of a job that has ended while nobody was attached
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kolovod.core.record_files import default_folder, is_ours
from kolovod.errors import BootstrapError, InvalidArgumentError

__all__ = ["JobFolder", "find", "found", "make"]


@dataclass(frozen=True)
class JobFolder:
    """One job's."""

    path: Path
    command: tuple[str, ...]
    began: str
    """Local time, to the second."""
    ticks: int
    """When the keeper was started, as the kernel counts: another process may have its pid later."""

    @property
    def pid(self) -> int:
        """Of the keeper, and the job's name."""
        return int(self.path.name)

    def is_kept(self) -> bool:
        """Whether the keeper is there."""
        return _ticks(self.pid) == self.ticks

    def exit_code(self) -> int | None:
        """Of a job that has ended with nobody attached; None: it goes on, or was killed."""
        try:
            return int((self.path / "exit_code").read_text())
        except (OSError, ValueError):
            return None

    def listen(self) -> socket.socket:
        """The keeper's socket."""
        listener = socket.socket(socket.AF_UNIX)
        with _short(self.path) as folder:
            listener.bind(f"{folder}/socket")
        listener.listen(4)
        return listener

    def connect(self) -> socket.socket:
        """To the keeper. Raises OSError if it is gone."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            with _short(self.path) as folder:
                connection.connect(f"{folder}/socket")
        except BaseException:
            connection.close()
            raise
        return connection

    def close_socket(self) -> None:
        """Nobody finds the keeper from now on. Idempotent."""
        (self.path / "socket").unlink(missing_ok=True)

    def leave(self, outputs: dict[str, str], code: int) -> None:
        """What is to be shown to who attaches later."""
        for stream, text in outputs.items():
            (self.path / stream).write_bytes(text.encode(errors="replace"))
        (self.path / "exit_code").write_text(str(code))

    def left(self, stream: str) -> str:
        """What ``leave`` has written of a stream."""
        return (self.path / stream).read_bytes().decode(errors="replace")

    def remove(self) -> None:
        """Forget the job."""
        shutil.rmtree(self.path, ignore_errors=True)


def make(command: tuple[str, ...]) -> JobFolder:
    """The folder of a job whose keeper is this process. Raises BootstrapError."""
    parent = _parent()
    path = parent / str(os.getpid())
    try:
        if not is_ours(parent.parent):
            raise PermissionError(0, "it belongs to somebody else", str(parent.parent))
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)  # of an earlier process with this pid
        path.mkdir(mode=0o700)
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        folder = JobFolder(path, command, began, _ticks(os.getpid()) or 0)
        text = json.dumps({"command": command, "began": began, "ticks": folder.ticks})
        (path / "job").write_text(text)
    except OSError as error:
        raise BootstrapError(f"{error.filename or path}: {error.strerror}") from None
    return folder


def found() -> list[JobFolder]:
    """All jobs that can be attached to, the oldest first. Folders of killed keepers are removed."""
    folders = []
    parent = _parent()
    if not parent.is_dir() or not is_ours(parent.parent):
        return []
    for path in parent.iterdir():
        try:
            job = json.loads((path / "job").read_text())
            folder = JobFolder(path, tuple(job["command"]), str(job["began"]), int(job["ticks"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is being made, or removed
        if folder.is_kept() or folder.exit_code() is not None:
            folders.append(folder)
        else:
            folder.remove()
    return sorted(folders, key=lambda folder: (folder.began, folder.pid))


def find(name: str | None) -> JobFolder:
    """The job of that name; None: the only one. Raises InvalidArgumentError."""
    folders = found()
    chosen = [folder for folder in folders if name is None or folder.path.name == name]
    if len(chosen) == 1:
        return chosen[0]
    if not folders:
        raise InvalidArgumentError(
            f"no elastic job of this user is on this host (in {_parent()} there is none)"
        )
    listed = "".join(f"\n  {_line(folder)}" for folder in folders)
    if name is None:
        raise InvalidArgumentError(f"name one of these jobs:{listed}")
    raise InvalidArgumentError(f"there is no job {name}; there are:{listed}")


def _line(folder: JobFolder) -> str:
    code = folder.exit_code()
    how = "" if code is None else f" (ended with exit code {code})"
    return f"{folder.pid}  since {folder.began}  {' '.join(folder.command)}{how}"


def _parent() -> Path:
    return default_folder() / "jobs"


def _ticks(pid: int) -> int | None:
    """When this process was started; None: there is none, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third field on, the state
    return None if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short name of a folder: those of sockets have 107 bytes at most."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)

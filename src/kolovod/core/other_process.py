"""Another process, as /proc shows it: this user's, or for root anybody's.

All that is read there is its user's word. Root looks as that user, so that a process which points
at files of others gets no more from root than it could get itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from kolovod.memory_files import is_memory_of, is_pipe_of, open_checked

__all__ = ["PROC", "OtherProcess"]

PROC = Path("/proc")
_MOST_BYTES = 8 << 20  # of a file in /proc: more than the kernel lets arguments have
_MOST_DESCRIPTORS = 1 << 16


class OtherProcess:
    """One process: what is asked later is asked of the same, or fails if that has ended.

    The methods raise OSError: PermissionError for another user's, else it has ended.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        """``proc``: where /proc is. Raises OSError."""
        self.pid = pid
        self._folder = os.open(proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._ids: tuple[int, int] | None = None

    @property
    def uid(self) -> int:
        """Whose it is. Raises PermissionError for one that has the rights of several users."""
        return self._user()[0]

    def _user(self) -> tuple[int, int]:
        if self._ids is None:
            uids, gids = self.status("Uid").split(), self.status("Gid").split()
            if len(set(uids)) != 1 or len(set(gids)) != 1:
                raise PermissionError(f"process {self.pid} has the rights of several users")
            self._ids = int(uids[0]), int(gids[0])
        return self._ids

    def read(self, name: str) -> bytes:
        """A file of its folder, or the beginning of one that is larger than it should be."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._folder)
        with os.fdopen(fd, "rb", buffering=0) as file:
            found = bytearray()
            while len(found) < _MOST_BYTES and (data := file.read(1 << 16)):
                found += data
        return bytes(found)

    def words(self, name: str) -> list[str]:
        """Return the words of a file of its folder whose words end with a zero byte."""
        return self.read(name).decode(errors="replace").rstrip("\0").split("\0")

    def status(self, name: str) -> str:
        """A field of its status (proc(5)). Raises ProcessLookupError if it has none any more."""
        beginning = f"{name}:"
        for line in self.read("status").decode(errors="replace").splitlines():
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise ProcessLookupError(f"process {self.pid} has no {name}")

    @contextlib.contextmanager
    def as_its_user(self) -> Iterator[None]:
        """Have the rights of its user, and no others: for root, in all threads of this process.

        Raises PermissionError for who may not become that user.
        """
        uid, gid = self._user()
        own_uid, own_gid = os.geteuid(), os.getegid()
        if own_uid == uid:
            yield
            return
        if own_uid != 0:
            raise PermissionError(f"process {self.pid} is another user's")
        groups = os.getgroups()
        try:
            os.setgroups([gid])
            os.setegid(gid)
            os.seteuid(uid)
            yield
        finally:
            os.seteuid(own_uid)
            os.setegid(own_gid)
            os.setgroups(groups)

    def open_memory(self, name: re.Pattern[str]) -> tuple[re.Match[str], int] | None:
        """Open the file in memory that it holds under such a name, to read; None: there is none.

        Use it as its user. The caller closes the descriptor.
        """
        for entry, found in self._named(name):
            with contextlib.suppress(FileNotFoundError):
                return found, self._open(entry, os.O_RDONLY, is_pipe=False)
        return None

    def open_pipe(self, number: int, flags: int) -> int:
        """Open the pipe that is its descriptor ``number``, if its user has made it; ``flags``: how.

        Use it as its user. The caller closes the descriptor, which does not wait.
        """
        return self._open(str(number), flags, is_pipe=True)

    def _named(self, name: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
        folder = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            for entry in filter(str.isdecimal, os.listdir(folder)[:_MOST_DESCRIPTORS]):
                with contextlib.suppress(FileNotFoundError):  # it was closed
                    link = os.readlink(entry, dir_fd=folder)
                    text = link.removeprefix("/memfd:").removesuffix(" (deleted)")
                    if (found := name.fullmatch(text)) is not None:
                        yield entry, found
        finally:
            os.close(folder)

    def _open(self, entry: str, flags: int, *, is_pipe: bool) -> int:
        check = is_pipe_of(self.uid) if is_pipe else is_memory_of(self.uid)
        return open_checked(f"fd/{entry}", check, flags, dir_fd=self._folder)

    def send_signal(self, signum: int) -> None:
        """Send it a signal: to this very process."""
        pidfd = os.pidfd_open(self.pid)
        try:
            self.read("stat")  # so it has lived until now, and the number was not another's before
            signal.pidfd_send_signal(pidfd, signum)
        finally:
            os.close(pidfd)

    def close(self) -> None:
        """Close its folder: nothing can be asked any more."""
        os.close(self._folder)

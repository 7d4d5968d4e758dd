"""Opens files that another may have put in the place of ours, /proc/PID/fd/N above all.

What is there need not be what is expected: another process may have the number by now, and a
process may hold descriptors of files that it has no right to read or write (``O_PATH``), under any
name. So the file is looked at before it is opened, and what was looked at is what is opened.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "OtherFileError",
    "is_file_in",
    "is_memory_of",
    "is_pipe_of",
    "open_checked",
    "open_own_memory",
]

Check = Callable[[os.stat_result], bool]


class OtherFileError(FileNotFoundError):
    """The file that is there is not the one that was to be opened."""


def open_checked(path: str, is_right: Check, flags: int, dir_fd: int | None = None) -> int:
    """Open ``path`` if ``is_right``; the caller closes the descriptor. Does not wait.

    Raises OtherFileError if something else is there, else what ``os.open`` does. Nothing is
    opened that is not right: devices and the file systems of users act when they are.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        if not is_right(os.fstat(place)):
            raise OtherFileError(f"{path} is another file")
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(f"/proc/self/fd/{place}", flags)
    finally:
        os.close(place)


def open_own_memory(path: str, name: str, flags: int) -> int:
    """Open the file in memory ``name`` that a process of this user holds, at ``path``.

    Raises OtherFileError if something else is there.
    """
    fd = open_checked(path, is_memory_of(os.geteuid()), flags)
    if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{name} (deleted)":
        os.close(fd)
        raise OtherFileError(f"{path} is another file")
    return fd


def is_memory_of(uid: int) -> Check:
    """Return a check whether it is a file that ``memfd_create`` has made for that user.

    Its name says nothing: in a mount namespace of its own a process may give that to any file.
    """

    def is_right(status: os.stat_result) -> bool:
        is_file = stat.S_ISREG(status.st_mode)
        return is_file and status.st_uid == uid and status.st_dev == _memory_device()

    return is_right


def is_file_in(folder: Path) -> Check:
    """Return a check whether it is a regular file that nobody else has put into ``folder``.

    If anybody may put files into the folder, it must be this user's. Elsewhere its owner says
    nothing: file servers have their own idea of who writes.
    """
    is_shared = bool(folder.stat().st_mode & stat.S_IWOTH)
    own = os.geteuid()
    return lambda status: stat.S_ISREG(status.st_mode) and (status.st_uid == own or not is_shared)


def is_pipe_of(uid: int) -> Check:
    """Return a check whether it is a pipe that this user has made."""
    return lambda status: stat.S_ISFIFO(status.st_mode) and status.st_uid == uid


@functools.cache
def _memory_device() -> int:
    """The file system of all files that ``memfd_create`` makes; -1 where there is none."""
    with contextlib.suppress(OSError):
        fd = os.memfd_create("kolovod-looks", os.MFD_CLOEXEC)
        try:
            return os.fstat(fd).st_dev
        finally:
            os.close(fd)
    return -1

"""A page in memory, which a rank's process shows to others of its user, and a bell.

The page is a file in memory whose name tells the descriptor of the bell, a pipe. Both are found
among the process's descriptors in /proc, which only the same user (or root) may open. So nothing
listens, there is no file to clean up, and it costs nothing while nobody looks. A process that
watches takes nothing on trust: root watches processes of others (``core.other_process``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kolovod.core.other_process import PROC, OtherProcess
from kolovod.memory_files import OtherFileError
from kolovod.observe.live.checked import checked

__all__ = ["Page", "PageReader", "PageUnavailableError"]

_NAME = "kolovod-live-"  # and the bell's descriptor
_PATTERN = re.compile(rf"{_NAME}([0-9]{{1,7}})")
_HEAD = struct.Struct("<8sII")  # what it is, bytes and checksum of the text
_MAGIC = b"KOLOLIV1"
_MOST_BYTES = 8 << 20
_TRIES = 50
_AGAIN_S = 0.001


class PageUnavailableError(Exception):
    """A process shows nothing; the text tells why."""


class Page:
    """The end of the process that shows itself. One thread writes."""

    def __init__(self) -> None:
        """Raises OSError where the system has no files in memory."""
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._fd = os.memfd_create(f"{_NAME}{self._write_fd}", os.MFD_CLOEXEC)
        except OSError:
            os.close(self._read_fd)
            os.close(self._write_fd)
            raise

    def write(self, parts: Sequence[str]) -> bool:
        """Show the JSON object that ``parts`` make together; False if it is too large."""
        body = "".join(parts).encode()
        if len(body) > _MOST_BYTES:
            return False
        # Whoever reads in the middle sees it by the checksum, and reads again.
        os.pwrite(self._fd, _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body, 0)
        return True

    def ring(self) -> None:
        """Make ``is_watched`` return, as if somebody looked."""
        _ring(self._write_fd)

    def is_watched(self, timeout_s: float | None) -> bool:
        """Return whether somebody has rung since the last call, or does within ``timeout_s``.

        None: wait without a limit.
        """
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)
        return True

    def close(self) -> None:
        """Show nothing any more, as in a forked child, whose descriptors are the parent's."""
        for fd in (self._fd, self._read_fd, self._write_fd):
            os.close(fd)


class PageReader:
    """The end of who watches a process."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        """``proc``: where /proc is. Raises PageUnavailableError."""
        try:
            with contextlib.closing(OtherProcess(pid, proc)) as process, process.as_its_user():
                found = process.open_memory(_PATTERN)
                if found is None:
                    raise PageUnavailableError(
                        "it is in no world: it has not called kolovod.init() yet, or has left"
                    )
                name, self._fd = found
                try:
                    self._bell = process.open_pipe(int(name[1]), os.O_WRONLY)
                except BaseException:
                    os.close(self._fd)
                    raise
        except OtherFileError:
            raise PageUnavailableError("its bell is no pipe of its user") from None
        except PermissionError:
            raise PageUnavailableError("it is another user's") from None
        except OSError:
            raise PageUnavailableError("it has ended") from None

    def ring(self) -> None:
        """Ask it to show what it does, for some seconds."""
        _ring(self._bell)

    def read(self) -> dict[str, Any]:
        """Return what the process shows now, checked.

        Raises PageUnavailableError if it stops in the middle of a word, or that makes no sense.
        """
        for _ in range(_TRIES):
            head = os.pread(self._fd, _HEAD.size, 0)
            if len(head) == _HEAD.size:
                magic, length, checksum = _HEAD.unpack(head)
                if magic != _MAGIC:
                    raise PageUnavailableError("it has another version of Kolovod")
                body = os.pread(self._fd, min(length, _MOST_BYTES), _HEAD.size)
                if len(body) == length and zlib.crc32(body) == checksum:
                    return _parse(body)
            time.sleep(_AGAIN_S)
        raise PageUnavailableError("what it shows is not whole")

    def close(self) -> None:
        """Watch no more."""
        os.close(self._fd)
        os.close(self._bell)


def _ring(fd: int) -> None:
    with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it has been rung often enough
        os.write(fd, b".")


def _parse(body: bytes) -> dict[str, Any]:
    facts = None
    with contextlib.suppress(ValueError, RecursionError):
        facts = checked(json.loads(body))
    if facts is None:
        raise PageUnavailableError("what it shows makes no sense")
    return facts

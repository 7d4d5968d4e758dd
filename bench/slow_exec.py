"""A file whose execution waits, as that of one on a file server that does not answer.

execve(2) asks the kernel, and the kernel asks who has marked the file (fanotify(7), which needs
root). It waits for the answer, which is given when the time is over.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path

__all__ = ["SlowExec"]

_CLASS_CONTENT = 0x4
_MARK_ADD = 0x1
_OPEN_EXEC_PERM = 0x40000
_AT_FDCWD = -100
_ALLOW = 0x1
_EVENT = struct.Struct("=IBBHQii")  # struct fanotify_event_metadata
_RESPONSE = struct.Struct("=iI")


class SlowExec:
    """Lets whoever executes ``path`` wait until ``close``, or until this process ends."""

    def __init__(self, path: Path) -> None:
        """Begin. Raises OSError where the kernel does not have that."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.fanotify_init(_CLASS_CONTENT, os.O_RDONLY | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "fanotify")
        os.set_inheritable(self._fd, False)
        mask = ctypes.c_uint64(_OPEN_EXEC_PERM)
        if libc.fanotify_mark(self._fd, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(path)) < 0:
            code = ctypes.get_errno()
            os.close(self._fd)
            raise OSError(code, os.strerror(code), str(path))
        self._asked: list[int] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of executions that were asked for so far, and wait."""
        return len(self._asked)

    def _collect(self) -> None:
        poll = select.poll()
        for fd in (self._fd, self._bell):
            poll.register(fd, select.POLLIN)
        while self._bell not in [fd for fd, _ in poll.poll()]:
            data = os.read(self._fd, 4096)
            while data:
                length, _, _, _, _, file, _ = _EVENT.unpack_from(data)
                self._asked.append(file)
                data = data[length:]

    def close(self) -> None:
        """Let all go on that wait."""
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        for file in self._asked:
            os.write(self._fd, _RESPONSE.pack(file, _ALLOW))
            os.close(file)
        os.close(self._fd)  # which allows what has not been read yet
        os.close(self._bell)

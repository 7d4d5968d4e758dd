"""A file that is a valid JSON array whenever it is read, and grows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from kolovod.errors import CommandArgumentError

__all__ = ["TraceFile"]

_PAGE = 4096
_END = b"\n]\n"
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one for each event


class TraceFile:
    """Events go in before the closing bracket, by writes that bring a new one along.

    So whoever reads the file, also after the process was killed, finds an array. Each write stays
    within a page if it can: the system may show, or do, half of a larger one. What is left is the
    one event that crosses from a page to the next: SIGKILL in that instant leaves a part of it.
    """

    def __init__(self, path: str, events: Sequence[dict[str, Any]]) -> None:
        """Make the file, or empty it, and begin with ``events`` (at least one).

        Raises InvalidArgumentError if that is not possible.
        """
        self.path = path
        self.failure = ""
        """Why nothing is written any more; "" while all is well."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise CommandArgumentError(
                f"the timeline cannot be written to {path!r}: {error.strerror}"
            ) from None
        self._end = 0
        self._write(b"[\n" + b",\n".join(_line(event) for event in events))
        if self.failure:
            self.close()
            raise CommandArgumentError(
                f"the timeline cannot be written to {path!r}: {self.failure}"
            )

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Add events. After a failure (a full disk, say) nothing more is written."""
        piece = bytearray()
        for event in events if self._fd >= 0 else ():
            line = b",\n" + _line(event)
            if piece and (self._end + len(piece)) % _PAGE + len(line + _END) > _PAGE:
                self._write(piece)
                piece.clear()
            piece += line
        if piece:
            self._write(piece)

    def close(self) -> None:
        """Close the file: nothing is written any more. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _write(self, text: bytes | bytearray) -> None:
        if self.failure:
            return
        whole = text + _END
        try:
            written = os.pwrite(self._fd, whole, self._end)
            if written != len(whole):
                raise OSError(f"{written} of {len(whole)} bytes")
            self._end += len(text)
        except OSError as error:
            self.failure = error.strerror or str(error)
            self._restore()

    def _restore(self) -> None:
        """Restore the file as it was before a write that failed."""
        try:
            end = _END if self._end else b"[]\n"
            os.pwrite(self._fd, end, self._end)
            os.ftruncate(self._fd, self._end + len(end))
        except OSError as error:
            self.failure += f"; nor could the file be closed properly ({error.strerror})"


def _line(event: dict[str, Any]) -> bytes:
    return _encode(event).encode()

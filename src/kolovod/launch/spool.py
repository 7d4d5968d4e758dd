"""The output of a job that nobody has shown yet."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

__all__ = ["Frame", "Spool"]

LIMIT_BYTES = 16 << 20
_NOTE = (
    "kolovod: {} bytes of earlier output are lost, since nobody was attached (--output-dir DIR "
    "keeps all)\n"
)


@dataclass(frozen=True)
class Frame:
    """Text that was written at once."""

    stream: str
    """ "stdout" or "stderr"."""
    text: str


class Spool:
    """A store of output, kept in order until it was shown.

    Its methods may be called on any thread. While somebody views, ``write`` waits for a viewer that
    is slow, as it would for a terminal; while nobody does, the oldest is dropped where there is
    more than ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._frames: deque[Frame] = deque()
        self._first = 0  # the number of the first of them
        self._bytes = 0
        self._dropped = 0
        self._view = 0  # the number of the present view; those before are over
        self._is_viewed = False
        self._code: int | None = None

    def write(self, stream: str, text: str) -> None:
        """Keep ``text``."""
        with self._changed:
            while self._bytes >= self._limit and self._is_viewed:
                self._changed.wait()
            self._frames.append(Frame(stream, text))
            self._bytes += len(text)
            while self._bytes > self._limit and not self._is_viewed and len(self._frames) > 1:
                self._dropped += self._pop()
            self._changed.notify_all()

    def end(self, code: int) -> None:
        """Note that the job has ended, and will write no more."""
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def begin_view(self) -> tuple[int, int]:
        """Begin to show it to somebody else; return the view, and the number of its first frame.

        What the view before has been given and not shown is given again.
        """
        with self._changed:
            if self._dropped:
                note = _NOTE.format(self._dropped)
                self._frames.appendleft(Frame("stderr", note))
                self._bytes += len(note)
                self._first -= 1
                self._dropped = 0
            self._view += 1
            self._is_viewed = True
            self._changed.notify_all()
            return self._view, self._first

    def next(self, view: int, number: int) -> Frame | int | None:
        """Wait for the frame of that number; or the job's exit code; None: the view is over."""
        with self._changed:
            while True:
                if view != self._view or not self._is_viewed:
                    return None
                if number < self._first + len(self._frames):
                    return self._frames[number - self._first]
                if self._code is not None:
                    return self._code
                self._changed.wait()

    def shown(self, view: int, number: int) -> None:
        """Note that all frames before that number were shown."""
        with self._changed:
            while view == self._view and self._first < number and self._frames:
                self._pop()
            self._changed.notify_all()

    def mark(self) -> int:
        """Return a mark, for ``is_shown``, of all that was written before now."""
        with self._changed:
            return self._first + len(self._frames)

    def is_shown(self, mark: int) -> bool:
        """Return whether all that was written before ``mark`` was shown, or dropped."""
        with self._changed:
            return self._first >= mark

    def end_view(self, view: int) -> None:
        """Nobody shows it any more, unless there is a later view."""
        with self._changed:
            if view == self._view:
                self._is_viewed = False
                self._changed.notify_all()

    def wait_for_view(self) -> None:
        """Return when nobody views."""
        with self._changed:
            while self._is_viewed:
                self._changed.wait()

    def rest(self) -> dict[str, str]:
        """Return all that nobody has shown, by stream."""
        with self._changed:
            rest = {"stdout": "", "stderr": _NOTE.format(self._dropped) if self._dropped else ""}
            for stream in rest:
                rest[stream] += "".join(f.text for f in self._frames if f.stream == stream)
            return rest

    def _pop(self) -> int:
        size = len(self._frames.popleft().text)
        self._bytes -= size
        self._first += 1
        return size

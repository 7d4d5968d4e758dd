"""The output of an agent's ranks, on its way to the launcher."""

from __future__ import annotations

from collections import deque

from kolovod.launch.agent_messages import WINDOW_BYTES
from kolovod.launch.spool import LIMIT_BYTES

__all__ = ["Outbox"]


class Outbox:
    """The frames of output, until the launcher has them; if it ``keeps``, until they were shown.

    Then another launcher gets them, too; as much as a ``Spool`` keeps.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._frames: deque[tuple[int, str, bytes]] = deque()
        self._bytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin anew: another launcher gets it all."""
        self._sent = 0  # of the frames
        self._sent_bytes = self._taken_bytes = 0  # by this launcher, of all
        self._dropped = 0  # of those that it was sent
        self._unsent_bytes = self._bytes

    def add(self, frame: tuple[int, str, bytes]) -> None:
        """Take one more frame."""
        self._frames.append(frame)
        self._bytes += len(frame[2])
        self._unsent_bytes += len(frame[2])
        while self._bytes > LIMIT_BYTES and len(self._frames) > 1:
            self._drop()

    def is_full(self) -> bool:
        """Return whether enough waits to be sent."""
        return self._unsent_bytes > WINDOW_BYTES

    def has_unsent(self) -> bool:
        """Return whether anything waits to be sent."""
        return self._sent < len(self._frames)

    def next(self, *, at_once: bool) -> tuple[int, str, bytes] | None:
        """Return the frame to be sent now.

        None: there is none, or enough is on its way (unless ``at_once``).
        """
        is_enough = self._sent_bytes - self._taken_bytes > WINDOW_BYTES and not at_once
        if not self.has_unsent() or is_enough:
            return None
        frame = self._frames[self._sent]
        self._sent += 1
        self._sent_bytes += len(frame[2])
        self._unsent_bytes -= len(frame[2])
        if not self._keeps:
            self._drop()
        return frame

    def took(self, count: int) -> None:
        """Note that the launcher has taken so many bytes."""
        self._taken_bytes = count

    def drop_shown(self, count: int) -> None:
        """Drop so many of the frames that the launcher was told."""
        while self._dropped < count and self._sent:
            self._drop()

    def _drop(self) -> None:
        size = len(self._frames.popleft()[2])
        self._bytes -= size
        if self._sent:
            self._sent -= 1
            self._dropped += 1
        else:
            self._unsent_bytes -= size

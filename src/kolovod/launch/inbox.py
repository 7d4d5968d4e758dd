"""The output of an agent's ranks, on its way from the agent's messages to who shows it."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from kolovod.launch.agent_messages import WINDOW_BYTES
from kolovod.launch.saved_state import Shown

__all__ = ["Inbox"]

_LAST_WORDS_S = 0.05


class Inbox:
    """A queue that passes frames on, on a thread of its own: whoever shows them may be slow.

    ``sink`` is called there with (rank, "stdout" or "stderr", bytes); ``took(bytes)`` by and by
    with the number that it has taken, so that the agent sends no more than fits; ``shown`` knows
    what of it users have seen.
    """

    def __init__(
        self,
        host: str,
        sink: Callable[[int, str, bytes], None],
        took: Callable[[int], None],
        shown: Shown | None,
    ) -> None:
        self._sink, self._took, self._shown = sink, took, shown
        self._frames: queue.SimpleQueue[tuple[int, str, bytes] | None] = queue.SimpleQueue()
        self._passed = 0  # of the frames
        self._came = 0
        self._shown_frames = 0
        self._marks: deque[tuple[int, int]] = deque()  # (frames, Shown.mark) of moments
        self._thread = threading.Thread(
            target=self._pass_on, name=f"kolovod output of {host}", daemon=True
        )

    def start(self) -> None:
        """Begin to pass on."""
        self._thread.start()

    def put(self, frame: tuple[int, str, bytes]) -> None:
        """Take a frame that has come."""
        self._came += 1
        self._frames.put(frame)

    def wait_for_last_words(self) -> None:
        """Wait a moment, so that what a rank has written is shown before its end is told."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._passed < self._came and time.monotonic() < deadline:
            time.sleep(0.002)

    def shown(self) -> int:
        """Return how many frames the agent need not keep."""
        if self._shown is None:
            return self._passed
        self._marks.append((self._passed, self._shown.mark()))
        frames = 0
        while self._marks and self._shown.is_shown(self._marks[0][1]):
            frames = self._marks.popleft()[0]
        self._shown_frames = max(self._shown_frames, frames)
        return self._shown_frames

    def close(self) -> None:
        """Pass on all frames that have come, and no more."""
        self._frames.put(None)
        self._thread.join()

    def _pass_on(self) -> None:
        took = told = 0
        while (frame := self._frames.get()) is not None:
            self._sink(*frame)
            self._passed += 1
            took += len(frame[2])
            if took > told + WINDOW_BYTES // 4:
                told = took
                self._took(took)

"""The meaning of signals to a launcher: its job ends, ends at once, or is told of them."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

__all__ = ["PASSED_ON_ONLY", "HeardSignals", "Meaning"]

PASSED_ON_ONLY = (signal.SIGUSR1, signal.SIGUSR2)
"""Ranks decide what these mean: a scheduler announces a time limit by them, for example."""
_SAME_S = 0.1
"""``timeout`` signals its child, and then the group in which that is: this is no second wish."""


class Meaning(Enum):
    """The action that a signal asks for."""

    PASS_ON = auto()
    END = auto()
    KILL = auto()


class HeardSignals:
    """Signals in the order in which they came, each once.

    Who ends all processes of a job (systemd, Slurm) signals several that pass it on to each other.
    So what comes again counts as a second wish only if it comes the same way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[tuple[int, str, float]] = deque()
        self._ends: dict[str, float] = {}
        """When the first came that ends the job, by the way by which it did."""

    def add(self, signum: int, way: str = "") -> None:
        """Note that ``signum`` came, by ``way``: "" to this process. For signal handlers, too."""
        self._waiting.append((signum, way, self._clock()))

    def __bool__(self) -> bool:
        """Return whether a signal waits that ends the job."""
        return any(signum not in PASSED_ON_ONLY for signum, _, _ in list(self._waiting))

    def take(self) -> tuple[int, Meaning] | None:
        """Return the next one that means anything; None: there is none."""
        while self._waiting:
            signum, way, came_s = self._waiting.popleft()
            if signum in PASSED_ON_ONLY:
                return signum, Meaning.PASS_ON
            is_first = not self._ends
            first_s = self._ends.setdefault(way, came_s)
            if is_first:
                return signum, Meaning.END
            if came_s - first_s > _SAME_S:
                return signum, Meaning.KILL
        return None

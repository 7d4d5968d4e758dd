"""Processes of an elastic job that live, and of which the others have nothing any more.

One hangs in a world, as the coordinator says (``kolovod.coordination.hanging``). Or a world has
formed without it, since nobody heard of it, or others could not reach it, and it does not end: who
hears of that world ends by itself.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping

from kolovod.launch.avoided_hosts import Process
from kolovod.launch.fleet import Fleet

__all__ = ["HungProcesses"]

_SHORTEST_S = 5.0
"""For an interpreter to end."""


class HungProcesses:
    """Kills such processes, so that others are started in their places."""

    def __init__(self, fleet: Fleet, limit_s: float) -> None:
        """``limit_s``: so long one that was left behind has to end, but some seconds at least.

        0: for ever.
        """
        self._fleet = fleet
        self._limit_s = max(limit_s, _SHORTEST_S) if limit_s else 0.0
        self._lock = threading.Lock()
        self._members: dict[int, str] = {}  # that hang, and why
        self._until_s: dict[int, float] = {}  # processes that were left behind

    def note(self, member: int, reason: str) -> None:
        """Note, on any thread, that a member was waited for in vain, and does not notice."""
        with self._lock:
            self._members[member] = reason

    def kill(self, member_of: Callable[[int], int | None]) -> None:
        """Kill those that hang."""
        with self._lock:
            members, self._members = self._members, {}
        for number in self._fleet.running if members else ():
            member = member_of(number)
            if member in members:
                self._kill(number, members[member])

    def kill_left_behind(
        self, processes: Mapping[int, Process], was_left_behind: Callable[[int], bool]
    ) -> None:
        """Kill those that were left behind, and whose time is over.

        Their time runs only while the fleet runs them: who is cut off hears of nothing.
        """
        now = time.monotonic()
        behind = {
            number
            for number in (self._fleet.running if self._limit_s else ())
            if not processes[number].has_resigned and was_left_behind(number)
        }
        self._until_s = {n: self._until_s.get(n, now + self._limit_s) for n in behind}
        for number, until_s in self._until_s.items():
            if now >= until_s:
                self._until_s[number] = now + 1.0
                self._kill(number, "the others have gone on without it, and it has not ended")

    def kill_times(self) -> list[float]:
        """Return when to look again."""
        return list(self._until_s.values())

    def _kill(self, number: int, reason: str) -> None:
        why = f"it was late for too long (KOLOVOD_LATE_FAILURE_S): {reason}"
        self._fleet.send(signal.SIGKILL, why, {number})

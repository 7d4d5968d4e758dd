"""Ranks that are stopped when all others have ended: nobody waits for them in an operation.

A rank that is stopped (SIGSTOP) while others wait for it is late, which the engine notices. After
the last operation only the launcher can: it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Set

__all__ = ["LOOK_S", "Standstill"]

LOOK_S = 0.5
"""Between two looks."""
_SLEPT_LOOKS = 10  # after so much time without a look this process was stopped itself


class Standstill:
    """A decision from looks at the ranks; it has no clock.

    ``report_s``, ``failure_s``: after how long all ranks that are left being stopped is to be
    reported, and a failure. 0: never.
    """

    def __init__(self, report_s: float, failure_s: float) -> None:
        """Nothing was seen yet."""
        self._report_s, self._failure_s = report_s, failure_s
        self._ranks: frozenset[int] = frozenset()
        self._since = self._last = 0.0
        self._reported = False

    @property
    def why(self) -> str:
        """The reason that is told of ranks that are killed for it."""
        return (
            f"it was stopped (SIGSTOP) for {self._failure_s:g} s, which is KOLOVOD_LATE_FAILURE_S, "
            "when all other ranks had ended"
        )

    def look(self, now: float, running: Set[int], stopped: Set[int]) -> str:
        """Return what is due: "report" (once), "failure", or "" for nothing.

        ``now``: seconds of a clock; ``running``: the ranks that have not ended while others have.
        """
        slept = now - self._last > _SLEPT_LOOKS * LOOK_S
        self._last = now
        if not running or running - stopped:
            self._ranks = frozenset()
            return ""
        if slept or self._ranks != running:
            self._ranks, self._since, self._reported = frozenset(running), now, False
        if 0 < self._failure_s <= now - self._since:
            return "failure"
        if not self._reported and 0 < self._report_s <= now - self._since:
            self._reported = True
            return "report"
        return ""

"""The facts of how a running job gets on, in one line.

They are the ranks that are up, steps per second, and the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kolovod.launch.step_rate import Seen
from kolovod.observe.units import duration_text

__all__ = ["StatusFacts"]


@dataclass(frozen=True)
class StatusFacts:
    """A moment of a job."""

    elapsed_s: float
    """The time since its launcher has started it."""
    up: int
    """Processes that run."""
    size: int
    """Ranks of its world; of an elastic job the newest one, before the first those to begin
    with."""
    seen: Seen = field(default_factory=Seen)
    """The step rate of its ranks."""

    def __str__(self) -> str:
        ranks = f"{self.up} of {self.size} ranks up"
        if self.up >= self.size:
            ranks = f"{self.size} {'rank' if self.size == 1 else 'ranks'} up"
        if self.up > self.size:
            ranks += f", {self.up - self.size} to join"
        parts = [f"{duration_text(self.elapsed_s)}  {ranks}"]
        if self.seen.steps_per_s is not None:
            parts.append(f"{self.seen.steps_per_s:.3g} steps/s")
        if self.seen.slowest is not None:
            here = "" if self.seen.is_all else " on this host"
            share = f" (others wait {self.seen.holds_up:.0%} of the time)"
            parts.append(f"slowest{here}: rank {self.seen.slowest}{share}")
        return ", ".join(parts)

"""The processes and links of a schedule (elastic_schedules)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from kolovod.coordination.consensus import NOTHING, Record, Stamp
from kolovod.coordination.coordinator_state import CoordinatorState


@dataclass(eq=False)
class Process:
    """A rank, or a launcher: its own number is negative."""

    pid: int
    slot: int
    host: str
    number: int | None
    coordinator_state: CoordinatorState | None
    record: Record = NOTHING
    replica: int = -1
    """The same of all that were started as one replica."""
    alive: bool = True
    stopped_until_s: float = 0.0
    believes_until_s: float = 0.0
    """So long it takes itself for the coordinator."""
    deaf_until_s: float = 0.0
    """So long it hears nobody, but is heard."""
    epoch: int = 0
    state: Stamp | None = None
    """Of the world that made the last step of which it has the result."""
    agreed_s: float = -9.0
    asked: Any = None
    asked_s: float = -9.0
    said: str = ""


class Network:
    """Hosts, who reaches whom, and what messages suffer."""

    def __init__(self, rng: Random) -> None:
        """Drawn from ``rng``, as later delays are."""
        self._rng = rng
        self.hosts = [f"h{i}" for i in range(rng.choice((1, 2, 2, 3, 3, 4)))]
        self.side = dict.fromkeys(self.hosts, 0)
        self.cut: set[frozenset[str]] = set()
        self.host_alive = dict.fromkeys(self.hosts, True)
        self.loss = rng.choice((0.0, 0.0, 0.05, 0.2))
        self.twice = rng.choice((0.0, 0.1, 0.3))
        self.slow = rng.choice((0.0, 0.1, 0.3, 0.5))

    def linked(self, a: str, b: str) -> bool:
        """Whether messages from host ``a`` arrive at ``b``."""
        if a == b:
            return self.host_alive[b]
        linked = self.side[a] == self.side[b] and frozenset((a, b)) not in self.cut
        return linked and self.host_alive[b]

    def delays(self, to_itself: bool) -> Iterator[float]:
        """Of each copy of a message that arrives, in seconds."""
        rng = self._rng
        for _ in range(2 if rng.random() < self.twice else 1):
            delay_s = rng.uniform(0.01, 0.06)
            if rng.random() < self.slow:
                delay_s += rng.uniform(0.2, 3.0)
            if to_itself:
                yield 0.0
            elif rng.random() >= self.loss:
                yield delay_s

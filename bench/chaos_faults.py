"""What bench/chaos.py does to a job: which faults there are, and which may be drawn.

A job can go on as long as a process lives that has its state, and a majority can be reached again
(docs/decisions/0032). So after at most two faults at a time, which are over after some seconds,
each job must become whole again, by these rules of drawing:

- of a job of four ranks or more two are killed at a time at most, and the next fault waits until
  the job is whole: then each rank has the state. Of the smallest world that may go on by itself
  beside a partition (two of four) one is killed, so one is left that has its state;
- who is killed on a host more often than the launcher tries again there (``RetryPolicy.retries``)
  is not started for a while, so a slot is killed that often at most in a job;
- nobody takes the place of a rank that leaves, so ranks leave down to four. Who is cut off, or
  without shared memory, may leave or fail: so none leaves beside such a fault.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from kolovod.elastic.hosts import RetryPolicy

__all__ = ["FEWEST", "KINDS", "Drawing", "Fault"]

FEWEST = 4
"""Ranks of a job."""
SECOND = 0.3
"""The share of faults after which another one comes while the job forms anew."""
KINDS = {
    "kill": 5,
    "stop": 3,
    "leave": 1,
    "link": 3,
    "partition": 3,
    "viewer": 1,
    "keeper": 2,
    "viewer and keeper": 1,
    "shared memory": 3,
}
"""How often each is drawn, in relation to the others."""
_NETWORK = ("link", "partition")
_TO_RANKS = ("kill", "stop", "leave", "shared memory")
_BESIDE_LEAVING = ("kill", "stop", "viewer", "keeper", "viewer and keeper")
_SHORT_S = (0.1, 0.3, 0.8, 1.2, 1.6, 2.5, 4.0)


@dataclass(frozen=True)
class Fault:
    """One, from ``at_s`` after the first of its turn on."""

    kind: str
    at_s: float = 0.0
    lasts_s: float = 0.0
    slot: int = -1
    """Of the rank."""
    hosts: tuple[str, ...] = ()
    """That are cut off from the others, or whose shared memory is full."""

    def __str__(self) -> str:
        what = [f"slot {self.slot}"] if self.slot >= 0 else []
        what += [f"host {' '.join(self.hosts)}"] if self.hosts else []
        what += [f"for {self.lasts_s:.1f} s"] if self.lasts_s else []
        what += [f"at {self.at_s:.2f} s"] if self.at_s else []
        return " ".join([f"{self.kind}:", *what]).rstrip(":")


class Drawing:
    """Draws the faults of one job; the same seed and number draw the same."""

    def __init__(
        self, seed: int, job: int, hosts: tuple[str, ...], ranks: int, kinds: dict[str, int]
    ) -> None:
        """``kinds``: as ``KINDS``; ``ranks`` are dealt to the ``hosts`` evenly."""
        self._random = random.Random(f"{seed}/{job}")
        self._hosts, self._kinds = hosts, kinds
        self._kills: Counter[int] = Counter()
        self.slots = list(range(ranks))
        """Where there are ranks: none is in that of a rank that has left."""

    def draw(self) -> list[Fault]:
        """The next turn: a fault, or two."""
        first = self._fault(list(self._kinds), 0.0)
        if first is None:
            raise ValueError(f"no fault of the kinds {list(self._kinds)} may be drawn any more")
        if self._random.random() >= SECOND:
            return [first]
        allowed = [kind for kind in self._kinds if _go_together(first.kind, kind)]
        at_s = self._random.choice([self._random.uniform(0, 0.15), self._random.uniform(0, 1.6)])
        second = self._fault(allowed, at_s, beside=first)
        return [first] if second is None else [first, second]

    def _fault(self, kinds: list[str], at_s: float, beside: Fault | None = None) -> Fault | None:
        """None: none of the kinds may be drawn."""
        slots = [slot for slot in self.slots if beside is None or slot != beside.slot]
        retries = RetryPolicy().retries
        to_kill = [slot for slot in slots if self._kills[slot] < retries]
        if not to_kill:
            kinds = [kind for kind in kinds if kind not in ("kill", "shared memory")]
        if len(self.slots) <= FEWEST:
            kinds = [kind for kind in kinds if kind != "leave"]
        if not kinds:
            return None
        draw = self._random
        (kind,) = draw.choices(kinds, [self._kinds[kind] for kind in kinds])
        lasts_s = draw.choice(_SHORT_S) * draw.uniform(0.8, 1.2)
        slot = -1
        hosts: tuple[str, ...] = ()
        if kind in _TO_RANKS:
            slot = draw.choice(to_kill if kind in ("kill", "shared memory") else slots)
        if kind in ("kill", "leave") or kind not in (*_NETWORK, *_TO_RANKS):
            lasts_s = 0.0
        if kind in ("kill", "shared memory"):
            self._kills[slot] += 1
        if kind == "leave":
            self.slots.remove(slot)
        if kind in ("link", "shared memory"):
            hosts = (draw.choice(self._hosts),)
        elif kind == "partition":
            hosts = tuple(draw.sample(self._hosts, draw.randint(1, len(self._hosts) - 1)))
        return Fault(kind, at_s, lasts_s, slot, hosts)


def _go_together(first: str, second: str) -> bool:
    if "leave" in (first, second):
        other = second if first == "leave" else first
        return other in _BESIDE_LEAVING
    if first in _NETWORK and second in _NETWORK:
        return first != second  # else the end of one would be that of both
    if "viewer" in first or "keeper" in first:
        return second not in ("viewer", "keeper", "viewer and keeper")
    return first != second or first in ("kill", "stop")

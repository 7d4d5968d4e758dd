"""What bench/chaos.py and bench/goodput.py do to a job: which faults there are, and may be drawn.

A job can go on as long as a process lives that has its state, and a majority can be reached again
(docs/design/membership.md). So after at most two faults at a time, which are over after some
seconds, each job must become whole again, by these rules of drawing:

- of a job of four ranks or more two are killed at a time at most, and the next fault waits until
  the job is whole: then each rank has the state. Of the smallest world that may go on by itself
  beside a partition (two of four) one is killed, so one is left that has its state;
- who is killed on a host more often than the launcher tries again there (``RetryPolicy.retries``)
  is not started for a while, so a slot is killed that often at most in a job. A rank that hangs
  counts, since its launcher kills it;
- nobody takes the place of a rank that leaves, so ranks leave down to four. Who is cut off, or
  without shared memory, may leave or fail: so none leaves beside such a fault, nor beside one that
  is not over after the seven seconds that a rank takes at most to leave (a rank that hangs, an
  agent or a keeper that is stopped);
- a full /tmp and a slow agent are on the host where the rank is killed beside it, since it is there
  that one takes its place. Where ranks have left, others may be on other hosts than they began on:
  such a fault still kills that rank, and is on that host;
- an agent takes all ranks of its host with it, so it is killed alone, only while no rank has left,
  and only where others have more than half of the ranks. All its slots count as killed;
- a job that is suspended is suspended as a whole, so nothing comes beside that;
- a job's folder is removed alone, and once in a job. No viewer is killed in that job afterwards:
  ``kolovod attach`` finds jobs by their folders.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kolovod.coordination.hosts import RetryPolicy

__all__ = ["FEWEST", "KINDS", "LOOPS", "Drawing", "Fault", "places"]

FEWEST = 4
"""Ranks of a job."""
SECOND = 0.3
"""The share of faults after which another one comes while the job forms anew."""
LOOPS = signal.SIGRTMIN + 1
"""A rank that is sent this signal is in an endless loop from then on."""
KINDS = {
    "kill": 5,
    "stop": 3,
    "loop": 1,
    "stopped": 1,
    "leave": 1,
    "link": 3,
    "partition": 3,
    "viewer": 1,
    "keeper": 2,
    "viewer and keeper": 1,
    "keeper stopped": 1,
    "agent": 1,
    "agent stopped": 1,
    "slow agent": 1,
    "suspended": 1,
    "shared memory": 3,
    "tmp": 2,
    "job folder": 1,
}
"""How often each is drawn, in relation to the others."""
_NETWORK = ("link", "partition")
_KILLING = ("kill", "loop", "stopped", "slow agent", "shared memory", "tmp")
_TO_RANKS = (*_KILLING, "stop", "leave")
_LAUNCHERS = ("viewer", "keeper", "viewer and keeper", "keeper stopped")
_AT_ONCE = ("kill", "loop", "stopped", "leave", *_LAUNCHERS[:3], "agent", "job folder")
_ALONE = ("agent", "suspended", "job folder")
_BESIDE_LEAVING = ("kill", "stop", "viewer", "keeper", "viewer and keeper")
_SHORT_S = (0.1, 0.3, 0.8, 1.2, 1.6, 2.5, 4.0)
_LONG_S = {
    "agent stopped": (12.5,),  # longer than an agent may be silent until its launcher wakes it
    "keeper stopped": (1.5, 4.0, 12.5),
    "suspended": (15.0,),
}


@dataclass(frozen=True)
class Fault:
    """One, from ``at_s`` after the first of its turn on."""

    kind: str
    at_s: float = 0.0
    lasts_s: float = 0.0
    slot: int = -1
    """Of the rank."""
    hosts: tuple[str, ...] = ()
    """That are cut off from the others, whose memory or /tmp is full, or whose agent it is."""

    def __str__(self) -> str:
        what = [f"slot {self.slot}"] if self.slot >= 0 else []
        what += [f"host {' '.join(self.hosts)}"] if self.hosts else []
        what += [f"for {self.lasts_s:.1f} s"] if self.lasts_s else []
        what += [f"at {self.at_s:.2f} s"] if self.at_s else []
        return " ".join([f"{self.kind}:", *what]).rstrip(":")


def places(hosts: Sequence[str], ranks: int) -> list[str]:
    """Return each slot's host: ranks are dealt evenly, and a host's slots follow each other."""
    return sorted((hosts[rank % len(hosts)] for rank in range(ranks)), key=list(hosts).index)


class Drawing:
    """Draws the faults of one job; the same seed and number draw the same."""

    def __init__(
        self, seed: int, job: int, hosts: tuple[str, ...], ranks: int, kinds: dict[str, int]
    ) -> None:
        """``kinds``: as ``KINDS``; ``ranks`` are dealt to the ``hosts`` evenly."""
        self._random = random.Random(f"{seed}/{job}")
        self._hosts, self._kinds = hosts, dict(kinds)
        self._places = places(hosts, ranks)
        self._kills: Counter[int] = Counter()
        self.slots = list(range(ranks))
        """Where there are ranks: none is in that of a rank that has left."""

    def draw(self) -> list[Fault]:
        """Draw the next turn: a fault, or two."""
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
        """Draw a fault; None: none of the kinds may be drawn."""
        slots = [slot for slot in self.slots if beside is None or slot != beside.slot]
        retries = RetryPolicy().retries
        to_kill = [slot for slot in slots if self._kills[slot] < retries]
        agents = self._agents_to_kill(retries)
        if not to_kill:
            kinds = [kind for kind in kinds if kind not in _KILLING]
        if not agents:
            kinds = [kind for kind in kinds if kind != "agent"]
        if len(self.slots) <= FEWEST:
            kinds = [kind for kind in kinds if kind != "leave"]
        if not kinds:
            return None
        draw = self._random
        (kind,) = draw.choices(kinds, [self._kinds[kind] for kind in kinds])
        lasts_s = draw.choice(_LONG_S.get(kind, _SHORT_S)) * draw.uniform(0.9, 1.1)
        if kind in _AT_ONCE:
            lasts_s = 0.0
        slot = -1
        hosts: tuple[str, ...] = ()
        if kind in _TO_RANKS:
            slot = draw.choice(to_kill if kind in _KILLING else slots)
        if kind in ("link", "shared memory", "agent stopped"):
            hosts = (draw.choice(self._hosts),)
        elif kind in ("tmp", "slow agent"):
            hosts = (self._places[slot],)
        elif kind == "agent":
            hosts = (draw.choice(agents),)
        elif kind == "partition":
            hosts = tuple(draw.sample(self._hosts, draw.randint(1, len(self._hosts) - 1)))
        self._count(kind, slot, hosts)
        return Fault(kind, at_s, lasts_s, slot, hosts)

    def _agents_to_kill(self, retries: int) -> list[str]:
        """Return hosts whose ranks may all be killed at once."""
        if len(self.slots) < len(self._places):
            return []
        found = []
        for host in self._hosts:
            slots = [slot for slot in self.slots if self._places[slot] == host]
            if 2 * len(slots) < len(self.slots) and all(self._kills[s] < retries for s in slots):
                found.append(host)
        return found

    def _count(self, kind: str, slot: int, hosts: tuple[str, ...]) -> None:
        """Count what follows from a fault for those that are drawn later."""
        if kind in _KILLING:
            self._kills[slot] += 1
        elif kind == "agent":
            self._kills.update(s for s in self.slots if self._places[s] in hosts)
        elif kind == "leave":
            self.slots.remove(slot)
        elif kind == "job folder":
            for gone in ("job folder", "viewer", "viewer and keeper"):
                self._kinds.pop(gone, None)


def _go_together(first: str, second: str) -> bool:
    if first in _ALONE or second in _ALONE:
        return False
    if "leave" in (first, second):
        other = second if first == "leave" else first
        return other in _BESIDE_LEAVING
    if first in _NETWORK and second in _NETWORK:
        return first != second  # else the end of one would be that of both
    if first in _LAUNCHERS:
        return second not in _LAUNCHERS
    return first != second or first in ("kill", "stop", "loop", "stopped")

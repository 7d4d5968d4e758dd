"""Counts of where a rank's time goes, kept as it runs: for metrics and TensorBoard.

A thread reads what a timeline would record four times a second, and adds it up. It lasts as long
as somebody wants the totals, from one world to the next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kolovod import _native
from kolovod.core import spans
from kolovod.core.spans import OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS, Span
from kolovod.core.world import World, when_engine_ends
from kolovod.observe.reading import Interval, intersection, length, union
from kolovod.observe.recorder import Operation, Recorder, engines_of

__all__ = ["Counting", "Totals", "counting", "enter", "forget", "leave"]

_PULL_S = 0.25
_MOST = 100_000
_FROM_ENGINE = ("operations", "buckets", "bytes", "late_reports")


@dataclass
class Totals:
    """Sums since the counting began; times in seconds."""

    steps: int = 0
    """Steps of an optimizer of ours; 0 where the framework runs it within a graph."""
    waiting_s: float = 0.0
    """The time in which the script did nothing but wait for communication."""
    communication_s: float = 0.0
    """The time in which the engine carried something."""
    hidden_s: float = 0.0
    """The part of it in which the script did not wait."""
    worlds: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    """The engines' counters: operations, buckets, bytes, late_reports."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by the host that they were sent to, this one's other ranks left out."""


class Adding:
    """Adds up what a rank has done. PURE.

    What the engine carried counts when the next batch comes: the wait for it may end after it.
    """

    def __init__(self, totals: Totals, stepped: Callable[[float], None]) -> None:
        """``stepped`` is told how long each step took, in seconds."""
        self._totals = totals
        self._stepped = stepped
        self._last_step_ns = 0
        self._carried: list[Interval] = []
        self._waits: list[Interval] = []

    def add(self, operations: Iterable[Operation], found: Iterable[Span]) -> None:
        """Add the operations and spans that have ended since the last call."""
        waits, ends = [], []
        for name, _, start, end, _ in found:
            if name in (WAIT, WAIT_FOR_GRADIENTS):
                waits.append((float(start), float(end)))
            elif name == OPTIMIZER_STEP:
                ends.append(end)
        buckets: dict[tuple[str, int], Interval] = {}
        for operation in operations:
            where, bucket, started, ended = operation[0], operation[6], *operation[9:]
            if bucket and started:
                low, high = buckets.get((where, bucket), (float(started), float(ended)))
                buckets[where, bucket] = min(low, started), max(high, ended)
        merged = union(waits)
        self._totals.waiting_s += length(merged) / 1e9
        self._count_carried(union([*self._waits, *merged]))
        self._carried, self._waits = union(buckets.values()), merged
        self._count_steps(ends)

    def _count_carried(self, waits: list[Interval]) -> None:
        total = length(self._carried)
        self._totals.communication_s += total / 1e9
        self._totals.hidden_s += (total - length(intersection(self._carried, waits))) / 1e9

    def _count_steps(self, ends: list[int]) -> None:
        self._totals.steps += len(ends)
        known = [self._last_step_ns, *sorted(ends)] if self._last_step_ns else sorted(ends)
        for before, after in pairwise(known):
            self._stepped((after - before) / 1e9)
        if ends:
            self._last_step_ns = max(ends)

    def pause(self) -> None:
        """The world ends: the time until the next step is none of a step."""
        self._last_step_ns = 0


class Counting:
    """Counts from now on. Any thread may call."""

    def __init__(self, world: World | None, stepped: Callable[[float], None] | None = None) -> None:
        """``world``: the present one. ``stepped`` is told how long each step took, in seconds."""
        self._lock = threading.Lock()
        self._totals = Totals()
        self._adding = Adding(self._totals, stepped or (lambda _: None))
        self._world: World | None = None
        self._begun: dict[str, int] = {}
        self._sent_begun: dict[str, int] = {}
        self._recorder = Recorder(self._engines, spans.log)
        self._stopping = threading.Event()
        if world is not None:
            self.enter(world)
        self._thread = threading.Thread(target=self._serve, name="kolovod-counting", daemon=True)
        self._thread.start()

    def enter(self, world: World) -> None:
        """A world has been formed."""
        with self._lock:
            self._world = world
            self._totals.worlds += 1
            self._begun, self._sent_begun = (
                dict(self._totals.counters),
                dict(self._totals.sent_bytes),
            )
            self._recorder.switch(True)

    def leave(self) -> None:
        """The world is about to end."""
        with self._lock:
            if self._world is not None:
                self._pull()
                self._recorder.switch(False)
                self._adding.pause()
                self._world = None

    def pull(self) -> None:
        """Count what has happened so far."""
        with self._lock:
            self._pull()

    def totals(self) -> tuple[Totals, World | None]:
        """Return the totals so far, and the present world."""
        with self._lock:
            self._pull()
            same = replace(
                self._totals,
                counters=dict(self._totals.counters),
                sent_bytes=dict(self._totals.sent_bytes),
            )
            return same, self._world

    def close(self) -> None:
        """Count no more."""
        self._stopping.set()
        self._thread.join()
        self.leave()

    def _engines(self) -> Mapping[str, _native.Engine]:
        return {} if self._world is None else engines_of(self._world)

    def _serve(self) -> None:
        while not self._stopping.wait(_PULL_S):
            self.pull()

    def _pull(self) -> None:
        """Count what has happened so far, under the lock."""
        world = self._world
        if world is None:
            return
        with contextlib.suppress(_native.EngineError):  # the world has failed
            self._recorder.pull()
            stats, sent = world.engine.stats(), world.engine.sent_bytes()
            for name in _FROM_ENGINE:
                self._totals.counters[name] = self._begun.get(name, 0) + stats[name]
            by_host: dict[str, int] = {}
            for peer, count in enumerate(sent):
                if world.hosts[peer] != world.host:
                    by_host[world.hosts[peer]] = by_host.get(world.hosts[peer], 0) + count
            for host, count in by_host.items():
                self._totals.sent_bytes[host] = self._sent_begun.get(host, 0) + count
        batch = self._recorder.take(_MOST)
        self._adding.add(batch.operations, batch.spans)


_open: list[Counting] = []


def counting(world: World | None, stepped: Callable[[float], None] | None = None) -> Counting:
    """Begin a counting that follows this process from world to world, until ``end`` closes it."""
    made = Counting(world, stepped)
    _open.append(made)
    return made


def end(counted: Counting) -> None:
    """Close what ``counting`` has returned."""
    _open.remove(counted)
    counted.close()


def enter(world: World) -> None:
    """From now on this process is in ``world``."""
    for each in _open:
        each.enter(world)


def leave() -> None:
    """The world of this process is about to end."""
    for each in _open:
        each.leave()


def forget() -> None:
    """Forget the countings in a forked child: their threads are the parent's."""
    _open.clear()


def _pull_all() -> None:
    for each in _open:
        each.pull()


when_engine_ends(_pull_all)

"""A rank's part of a timeline: its operations, from the engines' records, and its spans.

Every engine notes its last thousand operations anyway (``csrc/transport/operation_record.h``). A
recorder that reads them often enough misses none; what was overwritten in between is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kolovod import _native
from kolovod.core.spans import Span, SpanLog, SpanReader
from kolovod.core.world import World

__all__ = [
    "AS",
    "ON_GPU",
    "PULL_MOST_S",
    "PULL_S",
    "REPORT_S",
    "Batch",
    "Operation",
    "PullInterval",
    "Recorder",
    "engines_of",
]

AS = " as "  # between a dtype and a codec
ON_GPU = " on GPU"  # ends the name of what carries it
PULL_S = 0.05  # a thousand operations in that time
PULL_MOST_S = 0.25  # when little happens
REPORT_S = 0.5
"""Between two times that what was read is passed on: each costs more than the reading."""
_FEW = 300  # operations between two pulls
_MOST = 100_000
_UNDER_WAY = ("submitted", "started")

Operation = tuple[str, str, str, str, int, int, int, bool, int, int, int]
"""What carried it ("": the world's engine, else " in set 2", " on GPU"), name, verb, dtype
("float32 as int8" with a codec), tensors, bytes, bucket (0: none), whether it succeeded, and when
it was submitted, started (0: never) and ended (ns of CLOCK_MONOTONIC)."""


@dataclass
class Batch:
    """The operations and spans of one rank."""

    operations: list[Operation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    lost: int = 0
    """Operations that nobody has read in time."""

    def __bool__(self) -> bool:
        """Return whether anything happened."""
        return bool(self.operations or self.spans or self.lost)

    def holds(self, most: int) -> bool:
        """Return whether it has ``most`` of a kind, so that there may be more than was taken."""
        return len(self.operations) >= most or len(self.spans) >= most

    def shifted(self, by_ns: int) -> Batch:
        """Return the batch with all times shifted by ``by_ns``, to those of another clock."""
        operations = [
            (*rest, submitted + by_ns, started and started + by_ns, ended + by_ns)
            for *rest, submitted, started, ended in self.operations
        ]
        spans = [
            (name, who, start + by_ns, end + by_ns, cpu)
            for name, who, start, end, cpu in self.spans
        ]
        return Batch(operations, spans, self.lost)  # type: ignore[arg-type]


class _Reader:
    """Reads one engine's records, each completed operation once."""

    def __init__(self, engine: _native.Engine, *, is_new: bool) -> None:
        """``is_new``: what it has done so far counts, too."""
        self.engine = engine
        engine.keep_exact_times(True)
        records = [] if is_new else engine.last_operations()
        under_way = [r["number"] for r in records if r["state"] in _UNDER_WAY]
        self._newest = max((record["number"] for record in records), default=0)
        self._below = min(under_way, default=self._newest + 1) - 1
        # Read, and still among the records.
        self._read = {r["number"] for r in records if r["number"] > self._below} - {*under_way}
        self._pending: set[int] = set()
        self.pending: list[dict[str, Any]] = []
        """The records of what was not complete at the last call of ``read``."""

    def read(self) -> tuple[list[dict[str, Any]], int]:
        """Return the operations completed since the last call, and how many others are lost.

        An operation is lost if its record was overwritten before it was read.
        """
        records = self.engine.last_operations(self._below)
        numbers = {record["number"] for record in records}
        newest = max(numbers, default=self._newest)
        fresh = sum(number > self._newest for number in numbers)
        lost = max(0, newest - self._newest - fresh) + len(self._pending - numbers)
        self._newest = max(newest, self._newest)
        self.pending = [r for r in records if r["state"] in _UNDER_WAY]
        pending = self._pending = {record["number"] for record in self.pending}
        done = [
            record
            for record in records
            if record["state"] in ("done", "failed") and record["number"] not in self._read
        ]
        self._below = min(pending, default=self._newest + 1) - 1
        self._read |= {record["number"] for record in done}
        self._read = {number for number in self._read & numbers if number > self._below}
        return done, lost


class PullInterval:
    """The time between two pulls: as long as the engine's thousand notes allow."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: wait no longer, since more may happen than did before."""
        self._most_s = most_s
        self._pulled_s = time.monotonic()

    def pause_s(self, count: int) -> float:
        """Return how long to wait after a pull that has read ``count`` operations."""
        now_s = time.monotonic()
        passed_s, self._pulled_s = now_s - self._pulled_s, now_s
        pause_s = _FEW * passed_s / count if count else self._most_s
        return min(max(pause_s, PULL_S), self._most_s)


class Recorder:
    """Collects while it is on. Any thread may call."""

    def __init__(self, engines: Callable[[], Mapping[str, _native.Engine]], spans: SpanLog) -> None:
        """``engines``: asked for the present ones, by what ``Operation`` calls them."""
        self._engines = engines
        self._log = spans
        self._spans: SpanReader | None = None
        """Of the present or the last time that it is on."""
        self._lock = threading.Lock()
        self._readers: dict[str, _Reader] = {}
        self._operations: list[Operation] = []
        self._lost = 0
        self.on = False

    def switch(self, on: bool) -> None:
        """Begin with what happens from now on, or end; what was collected is still there."""
        with self._lock:
            if on == self.on:
                return
            if on:
                self._find_engines()
                self._spans = self._log.open()
            else:
                self._pull()
                for reader in self._readers.values():
                    reader.engine.keep_exact_times(False)
                self._readers.clear()
                if self._spans is not None:
                    self._spans.close()
            self.on = on

    def pull(self) -> int:
        """Read what is new; at least every PULL_S, and before an engine goes away.

        Returns how many operations that was: less than a thousand of an engine are never too many.
        """
        with self._lock:
            if not self.on:
                return 0
            before = len(self._operations) + self._lost
            self._pull()
            return len(self._operations) + self._lost - before

    def pending(self) -> list[tuple[str, str, str, int]]:
        """Return the operations that were not complete at the last read.

        For each: what carries it, its name, its verb and when it was submitted (ns).
        """
        with self._lock:
            return [
                (where, record["name"], record["verb"], record["submitted_ns"])
                for where, reader in self._readers.items()
                for record in reader.pending
            ]

    def take(self, most: int) -> Batch:
        """Return the oldest that was collected, ``most`` of a kind; call it until it is empty."""
        with self._lock:
            operations, self._operations = self._operations[:most], self._operations[most:]
            lost, self._lost = self._lost, 0
            spans = [] if self._spans is None else self._spans.take(most)
        return Batch(operations, spans, lost)

    def put_back(self, batch: Batch) -> None:
        """Put back the batch that was taken last: it has reached nobody."""
        with self._lock:
            self._operations[:0] = batch.operations
            self._lost += batch.lost
            if self._spans is not None:
                self._spans.put_back(batch.spans)

    def _find_engines(self) -> None:
        engines = self._engines()
        for where in [w for w, r in self._readers.items() if engines.get(w) is not r.engine]:
            del self._readers[where]
        for where, engine in engines.items():
            if where not in self._readers:
                self._readers[where] = _Reader(engine, is_new=self.on)

    def _pull(self) -> None:
        self._find_engines()
        for where, reader in self._readers.items():
            records, lost = reader.read()
            self._operations += [_operation(where, record) for record in records]
            self._lost += lost
        self._lost += max(0, len(self._operations) - _MOST)
        del self._operations[:-_MOST]


def engines_of(world: World) -> Mapping[str, _native.Engine]:
    """Return the engines of the world and its process sets, as Operation calls them."""
    engines = {"": world.engine}
    for number, process_set in dict(world.sets.by_id).items():
        if process_set.engine is not None:
            engines[f" in set {number}"] = process_set.engine
    return engines


def _operation(where: str, record: Mapping[str, Any]) -> Operation:
    on_gpu = ON_GPU if record["device"] != "host memory" else ""
    return (
        where + on_gpu,
        record["name"],
        record["verb"],
        (record["dtype"] or "") + (f"{AS}{record['codec']}" if record["codec"] else ""),
        record["tensors"],
        record["bytes"],
        record["bucket"] or 0,
        record["state"] == "done",
        record["submitted_ns"],
        record["started_ns"],
        record["ended_ns"],
    )

"""The events of Chrome's trace format, from what the ranks did. PURE: no clock, no file.

The format is Google's "Trace Event Format", which Perfetto and chrome://tracing read. A process is
a rank, and its rows (threads) are: those of the training script, one with the buckets as the engine
carried them, and one for each name of an operation. Phases are named as Horovod's are: what waits
until all ranks have submitted it is ``NEGOTIATE_ALLREDUCE``, what is carried ``ALLREDUCE``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kolovod.core.spans import Cpu
from kolovod.observe.recorder import Batch, Operation
from kolovod.observe.whereabouts import Whereabouts

__all__ = ["BUCKETS", "CYCLE", "LINKS", "LOST", "NEGOTIATE", "Event", "Trace", "label"]

Event = dict[str, Any]

BUCKETS = "buckets"
CYCLE = "CYCLE_START"
LINKS = "kolovod_links"
LOST = "operations not shown"
NEGOTIATE = "NEGOTIATE_"
_MOST_ROWS = 1000  # of a rank; what has further names shares one
_OTHERS = "other operations"
# Numbers that grow make no names: such operations share rows.
_UNNAMED = re.compile(r"^unnamed\.(?:\d+|join)$|\.noname\.\d+")


@dataclass
class _Rank:
    """The rows of one rank, by label. Operations that overlap in time get a row each."""

    rows: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(number of the row, end of what was last put there)"""
    count: int = 0
    last_bucket: dict[str, int] = field(default_factory=dict)
    """The last bucket that is shown, by what carried it."""


class Trace:
    """Makes the events of a trace, in any order of the ranks."""

    def __init__(self, start_ns: int, wall_ns: int, *, mark_cycles: bool = False) -> None:
        """``start_ns``, ``wall_ns``: when it begins, by the clock of all events and since 1970.

        ``mark_cycles``: an instant at the start of every bucket of rank 0.
        """
        self._start_ns = start_ns
        self._wall_ns = wall_ns
        self._mark_cycles = mark_cycles
        self._ranks: dict[int, _Rank] = {}

    def opening(self) -> list[Event]:
        """Return the events that a trace begins with."""
        started = {"name": "kolovod", "start_time_since_epoch_in_micros": self._wall_ns // 1000}
        return [_meta("process_name", 0, 0, started), _sort("process", 0, 0, -1)]

    def links(self, bytes_per_s: float, latency_s: float) -> list[Event]:
        """Return the bandwidth and latency that the ranks assume for a link between hosts."""
        facts = {"bytes_per_s": bytes_per_s, "latency_s": latency_s}
        return [_meta(LINKS, 0, 0, facts)]

    def add(
        self, rank: int, host: str, batch: Batch, where: Whereabouts | None = None
    ) -> list[Event]:
        """Return the events of what ``rank``, on ``host``, has done; ``where``, if known."""
        events: list[Event] = []
        if rank not in self._ranks:
            self._ranks[rank] = _Rank()
            facts: dict[str, Any] = {"name": f"rank {rank} ({host})", "rank": rank, "host": host}
            facts |= where._asdict() if where is not None else {}
            events += [
                _meta("process_name", rank + 1, 0, facts),
                _sort("process", rank + 1, 0, rank),
            ]
        for name, thread, start, end, cpu in batch.spans:
            if end < self._start_ns:
                continue
            row = self._row(rank, thread, start, end, events, named=False, may_nest=True)
            events.append(self._slice(name, rank, row, start, end, _cpu_facts(cpu)))
        # Other ranks may be ready earlier: what is under way begins with the trace.
        operations = [
            operation for operation in batch.operations if operation[10] >= self._start_ns
        ]
        for operation in operations:
            events += self._operation(rank, operation)
        events += self._buckets(rank, operations)
        if batch.lost:
            last = max((operation[-1] for operation in batch.operations), default=self._start_ns)
            row = self._row(rank, BUCKETS, last, last, events, named=False, may_nest=True)
            lost = self._instant(LOST, rank + 1, row, last, "p")
            events.append({**lost, "args": {"operations": batch.lost}})
        return events

    def _operation(self, rank: int, operation: Operation) -> Iterator[Event]:
        where, name, verb, dtype, tensors, size, bucket, ok, submitted, started, ended = operation
        new: list[Event] = []
        row = self._row(rank, label(where, name, verb), submitted, ended, new, named=True)
        yield from new
        facts: dict[str, Any] = {"bucket": bucket, "where": where}
        waited = started or ended
        yield self._slice(NEGOTIATE + verb.upper(), rank, row, submitted, waited, facts)
        if started:
            more = {"bytes": size, "tensors": tensors, "dtype": dtype, "ok": ok}
            yield self._slice(verb.upper(), rank, row, started, ended, facts | more)

    def _buckets(self, rank: int, operations: list[Operation]) -> list[Event]:
        """Show each bucket as soon as one of its operations is; nearly always all come at once."""
        found: dict[tuple[str, int], list[Operation]] = {}
        for operation in operations:
            if operation[6] and operation[9]:
                found.setdefault((operation[0], operation[6]), []).append(operation)
        events: list[Event] = []
        shown = self._ranks[rank].last_bucket
        for (where, bucket), members in sorted(found.items()):
            if bucket <= shown.get(where, 0):
                continue
            shown[where] = bucket
            start, end = members[0][9], max(member[10] for member in members)
            row = self._row(rank, BUCKETS + where, start, end, events, named=False, may_nest=True)
            facts = {
                "bucket": bucket,
                "where": where,
                "operations": len(members),
                "bytes": sum(member[5] for member in members),
            }
            events.append(self._slice(members[0][2].upper(), rank, row, start, end, facts))
            if self._mark_cycles and rank == 0:
                events.append(self._instant(CYCLE, 0, 0, start, "g"))
        return events

    def _row(
        self,
        rank: int,
        label: str,
        start: int,
        end: int,
        events: list[Event],
        *,
        named: bool,
        may_nest: bool = False,
    ) -> int:
        """Return the row for ``label`` that is free then; a new one is introduced in ``events``."""
        place = self._ranks[rank]
        if label not in place.rows and place.count >= _MOST_ROWS and named:
            label = _OTHERS
        lanes = place.rows.setdefault(label, [])
        for index, (row, busy_until) in enumerate(lanes):
            if may_nest or busy_until <= start or place.count >= 2 * _MOST_ROWS:
                lanes[index] = (row, max(end, busy_until))
                return row
        row = place.count = place.count + 1
        lanes.append((row, end))
        text = label if len(lanes) == 1 else f"{label} ({len(lanes)})"
        events += [
            _meta("thread_name", rank + 1, row, {"name": text}),
            _sort("thread", rank + 1, row, row + (_MOST_ROWS if named else 0)),
        ]
        return row

    def _slice(
        self, name: str, rank: int, row: int, start: int, end: int, facts: dict[str, Any]
    ) -> Event:
        start = max(start, self._start_ns)
        return {
            "name": name,
            "ph": "X",
            "pid": rank + 1,
            "tid": row,
            "ts": self._micros(start),
            "dur": max(0, end - start) / 1000,
            **({"args": dict(facts)} if facts else {}),
        }

    def _instant(self, name: str, pid: int, tid: int, at: int, scope: str) -> Event:
        return {
            "name": name,
            "ph": "i",
            "s": scope,
            "pid": pid,
            "tid": tid,
            "ts": self._micros(at),
        }

    def _micros(self, at: int) -> float:
        return (at - self._start_ns) / 1000


def _cpu_facts(cpu: Cpu) -> dict[str, float]:
    """Return the processor time within a span, and by its end since the process began."""
    if len(cpu) != 4:
        return {}
    thread_before, thread, process_before, process = cpu
    return {
        "cpu_us": (thread - thread_before) / 1000,
        "process_cpu_us": (process - process_before) / 1000,
        "cpu_by_then_us": thread / 1000,
        "process_cpu_by_then_us": process / 1000,
    }


def label(where: str, name: str, verb: str) -> str:
    """Return the row of an operation, as ``Operation`` has it."""
    if _UNNAMED.search(name):
        return f"{verb}.noname{where}"
    return (name if name.startswith(f"{verb}.") else f"{verb}.{name}") + where


def _meta(name: str, pid: int, tid: int, facts: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": facts}


def _sort(what: str, pid: int, tid: int, index: int) -> Event:
    return _meta(f"{what}_sort_index", pid, tid, {"sort_index": index})

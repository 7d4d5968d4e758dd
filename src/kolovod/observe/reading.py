"""The events of a timeline, rank by rank. PURE, but for ``read``.

This is what ``kolovod timeline`` and ``kolovod plan`` have in common: the events of each rank,
sorted, and arithmetic of intervals.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kolovod.core.spans import CHOSEN, OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS
from kolovod.errors import CommandArgumentError
from kolovod.observe.trace import BUCKETS, LINKS, LOST, NEGOTIATE, Event

__all__ = [
    "Events", "Interval", "Operation", "RankEvents", "StepEnd", "WaitCpu",
    "clipped", "count_steps", "intersection", "length", "of_ranks", "read", "repeated", "union",
]  # fmt: skip

Interval = tuple[float, float]
Key = tuple[Any, ...]
"""The key of an operation, the same on all ranks: what carried it, bucket, row, and which one
there."""

_LANE = re.compile(r" \(\d+\)$")  # which of several rows for a label need not be the same
_WAITS = (WAIT, WAIT_FOR_GRADIENTS)
_MOST = 1 << 62  # of what is counted or measured


class Operation(NamedTuple):
    """An operation that a bucket has carried, on one rank; times in microseconds."""

    row: str
    """Its name and verb, ``allreduce.loss``; unnamed ones of a verb share one."""
    verb: str
    bytes: int
    tensors: int
    dtype: str
    """The dtype of the first tensor; "float32 as int8" with a codec."""
    started_us: float
    ended_us: float


class StepEnd(NamedTuple):
    """Processor time since the process began, at the end of an optimizer step; microseconds."""

    at_us: float
    thread_cpu_us: float
    process_cpu_us: float


class WaitCpu(NamedTuple):
    """Processor time of the process while the script waited, and when that was; microseconds."""

    start_us: float
    end_us: float
    thread_cpu_us: float
    process_cpu_us: float


@dataclass
class RankEvents:
    """The events of one rank; times in microseconds."""

    host: str = ""
    machine: str = ""
    """Equal for hosts of one kernel; "" unknown."""
    cores: float = 0
    """The number of cores that it may use; 0 unknown."""
    mask: int = 0
    """The cores that it may use: bit n for core n."""
    waits: list[Interval] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)
    step_ends: list[StepEnd] = field(default_factory=list)
    wait_cpu: list[WaitCpu] = field(default_factory=list)
    carried: list[Interval] = field(default_factory=list)
    submitted: dict[Key, float] = field(default_factory=dict)
    operations: dict[Key, Operation] = field(default_factory=dict)
    seen: Counter[Key] = field(default_factory=Counter)
    choices: list[tuple[float, str]] = field(default_factory=list)
    """When what was chosen, and why."""
    first: float = float("inf")
    last: float = float("-inf")


@dataclass
class Events:
    """The events of all ranks."""

    ranks: dict[int, RankEvents]
    lost: int = 0
    """Operations that the timeline does not show."""
    counted_by: str = ""
    """The operation whose submissions are taken for the steps' ends; "": the script tells them."""
    link: tuple[float, float] | None = None
    """Bytes per second and seconds of latency that the ranks took a link to have at the end."""


def read(path: Path) -> list[Event]:
    """Return the events of a timeline's file. Raises InvalidArgumentError if it is none.

    Of a process that was killed in the instant between two pages of a write the last event may be
    half there (trace_file.py): it is left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        if text.lstrip().startswith("[") and not text.rstrip().endswith("]"):
            text = text.rpartition(",\n")[0] + "]"
        events = json.loads(text)
    except OSError as error:
        raise CommandArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CommandArgumentError(f"{path} is no timeline: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise CommandArgumentError(f"{path} is no timeline: expected an array of events")
    return events


def of_ranks(events: Iterable[Event]) -> Events:
    """Sort a trace. Raises InvalidArgumentError if it is not Kolovod's, or shows no rank."""
    found = Events({})
    rows: dict[tuple[int, int], str] = {}
    for index, event in enumerate(events):
        try:
            _sort_in(event, found, rows)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CommandArgumentError(
                f"event {index} of this timeline is none of Kolovod's: {type(error).__name__}: "
                f"{error}: {reprlib.repr(event)}"
            ) from None
    numbered = {pid - 1: found.ranks[pid] for pid in sorted(found.ranks)}
    found.ranks = {number: rank for number, rank in numbered.items() if rank.last > rank.first}
    if not found.ranks:
        raise CommandArgumentError(
            "this timeline shows no rank: was it written by Kolovod, and did anything happen?"
        )
    return found


def repeated(rank: RankEvents) -> tuple[str, list[float]]:
    """Return an operation, of those most of which come equally often, and its submissions' times.

    ("", []) if none comes again.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for (_, _, row, _), at_us in rank.submitted.items():
        if ".noname" not in row:
            times[row].append(at_us)
    counts = Counter(len(found) for found in times.values() if len(found) > 1)
    if not counts:
        return "", []
    often = max(counts, key=lambda count: (counts[count], count))
    row = next(row for row, found in times.items() if len(found) == often)
    return row, sorted(times[row])


def count_steps(found: Events) -> None:
    """Count steps by an operation that comes once in each, if no optimizer tells them."""
    if any(rank.steps for rank in found.ranks.values()):
        return
    row, _ = repeated(found.ranks[min(found.ranks)])
    if not row:
        return
    found.counted_by = row
    for rank in found.ranks.values():
        times = [at for key, at in rank.submitted.items() if key[2] == row]
        rank.steps = [(at, at) for at in sorted(times)]


def _sort_in(event: Event, found: Events, rows: dict[tuple[int, int], str]) -> None:
    pid, kind, name = event.get("pid", 0), event.get("ph"), event.get("name", "")
    facts = event.get("args", {})
    if kind == "M" and name == "process_name" and "rank" in facts:
        rank = found.ranks.setdefault(_whole(pid), RankEvents())
        rank.host, rank.machine = str(facts.get("host", "")), str(facts.get("machine", ""))
        rank.cores, rank.mask = _positive(facts.get("cores", 0)), int(facts.get("mask", "0"), 16)
    elif kind == "M" and name == "thread_name":
        rows[pid, event["tid"]] = str(facts.get("name", ""))
    elif kind == "M" and name == LINKS:
        found.link = (_positive(facts["bytes_per_s"]), _positive(facts["latency_s"]))
    elif kind == "i" and name == LOST:
        found.lost += _whole(facts.get("operations", 0))
    elif kind == "X" and pid in found.ranks:
        _take(found.ranks[pid], event, rows.get((pid, event["tid"]), ""))


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise ValueError(f"{reprlib.repr(value)} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -_MOST <= value <= _MOST:
        raise ValueError(f"{reprlib.repr(value)} is no number")
    return float(value)


def _positive(value: Any) -> float:
    """Return a number that is not below 0."""
    if _number(value) < 0:
        raise ValueError(f"{value!r} is less than 0")
    return float(value)


def _take(rank: RankEvents, event: Event, row: str) -> None:
    name, facts = str(event["name"]), event.get("args", {})
    start = _number(event["ts"])
    end = start + _number(event["dur"])
    rank.first, rank.last = min(rank.first, start), max(rank.last, end)
    if row.startswith(BUCKETS):
        rank.carried.append((start, end))
    elif "bucket" not in facts:
        _take_span(rank, name, (start, end), facts)
    elif facts["bucket"]:
        label = _LANE.sub("", row)
        # Unnamed ones share a row; the ranks submit them in the same order.
        before = rank.seen[facts["bucket"], label, name]
        rank.seen[facts["bucket"], label, name] += 1
        key = (str(facts.get("where", "")), _whole(facts["bucket"]), label, before)
        if name.startswith(NEGOTIATE):
            rank.submitted[key] = start
        else:
            size = max(0, _whole(facts.get("bytes", 0)))
            tensors = max(1, _whole(facts.get("tensors", 1)))
            dtype = str(facts.get("dtype", ""))
            rank.operations[key] = Operation(label, name, size, tensors, dtype, start, end)


def _take_span(rank: RankEvents, name: str, span: Interval, facts: dict[str, Any]) -> None:
    """Add a span of the script's to what is known of its rank."""
    if name in _WAITS:
        rank.waits.append(span)
        if "cpu_us" in facts:
            cpu = _number(facts["cpu_us"]), _number(facts["process_cpu_us"])
            rank.wait_cpu.append(WaitCpu(*span, *cpu))
    elif name == OPTIMIZER_STEP:
        rank.steps.append(span)
        if "cpu_by_then_us" in facts:
            thread, process = facts["cpu_by_then_us"], facts["process_cpu_by_then_us"]
            rank.step_ends.append(StepEnd(span[1], _number(thread), _number(process)))
    elif name.startswith(CHOSEN):
        rank.choices.append((span[0], name.removeprefix(CHOSEN)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, merged where they overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of the intervals that lie in a window."""
    low, high = window
    cut = [(max(start, low), min(end, high)) for start, end in intervals]
    return [(start, end) for start, end in cut if end > start]


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times that lie in both; each is without overlaps and in order."""
    found = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of all intervals together."""
    return sum(end - start for start, end in intervals)

"""What a timeline says about a training: where its time goes, and who is slow. PURE.

From the spans and operations of each rank (trace.py):

- *exposed*: the time in which the script did nothing but wait for communication; all other time is
  compute (or input, or whatever else the script did);
- *communication*: the time in which the engine carried something; what of it is not exposed was
  *hidden* behind compute;
- the *straggler*: the rank that submitted last while others did nothing but wait for it;
- a step ends where an optimizer step does.
"""

from __future__ import annotations

import json
import re
import reprlib
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from kolovod.core.spans import OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS
from kolovod.errors import InvalidArgumentError
from kolovod.observe.trace import BUCKETS, LOST, NEGOTIATE, Event

__all__ = ["RankSummary", "Summary", "read", "summarize", "text"]

Interval = tuple[float, float]

_LANE = re.compile(r" \(\d+\)$")  # which of several rows for a label need not be the same
_WAITS = (WAIT, WAIT_FOR_GRADIENTS)
_STEPS_TO_WARM_UP = 2
_FEW_STEPS = 3
_LITTLE = 0.05  # of a step: not worth an advice
_MOST = 1 << 62  # of what is counted or measured


@dataclass(frozen=True)
class RankSummary:
    """Of one rank; times in microseconds, in a window without the first steps."""

    rank: int
    host: str
    window_us: float
    exposed_us: float
    communication_us: float
    hidden_us: float
    steps: int
    step_us: float
    """Median; 0 without optimizer steps."""
    held_up_us: float
    """In which another rank did nothing but wait, and this one was the last to submit."""
    last: int
    """How often it was the last to submit."""


@dataclass(frozen=True)
class Summary:
    """Of all ranks."""

    ranks: list[RankSummary]
    operations: int
    """That all ranks took part in."""
    bytes: int
    """Of those, on one rank."""
    lost: int
    """Operations that the timeline does not show."""


@dataclass
class _Rank:
    """The events of one rank."""

    host: str = ""
    waits: list[Interval] = field(default_factory=list)
    steps: list[Interval] = field(default_factory=list)
    carried: list[Interval] = field(default_factory=list)
    submitted: dict[tuple[Any, ...], float] = field(default_factory=dict)
    bytes: dict[tuple[Any, ...], int] = field(default_factory=dict)
    seen: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    first: float = float("inf")
    last: float = float("-inf")


def read(path: Path) -> list[Event]:
    """The events of a timeline's file. Raises InvalidArgumentError if it is none.

    Of a process that was killed in the instant between two pages of a write the last event may be
    half there (trace_file.py): it is left out.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text.rstrip().endswith("]"):
            text = text.rpartition(",\n")[0] + "]"
        events = json.loads(text)
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no timeline: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise InvalidArgumentError(f"{path} is no timeline: expected an array of events")
    return events


def summarize(events: Iterable[Event]) -> Summary:
    """Add up the events of a trace. Raises InvalidArgumentError if they are not Kolovod's."""
    ranks, lost = _sort_out(events)
    if not ranks:
        raise InvalidArgumentError(
            "this timeline shows no rank: was it written by Kolovod, and did anything happen?"
        )
    common = set.intersection(*(set(rank.submitted) for rank in ranks.values()))
    held_up = _held_up(ranks, common)
    return Summary(
        [_of_rank(number, rank, *held_up[number]) for number, rank in ranks.items()],
        len(common),
        sum(size for key, size in ranks[min(ranks)].bytes.items() if key in common),
        lost,
    )


def _sort_out(events: Iterable[Event]) -> tuple[dict[int, _Rank], int]:
    ranks: dict[int, _Rank] = {}
    rows: dict[tuple[int, int], str] = {}
    lost = 0
    for index, event in enumerate(events):
        try:
            lost += _sort_in(event, ranks, rows)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"event {index} of this timeline is none of Kolovod's: {type(error).__name__}: "
                f"{error}: {reprlib.repr(event)}"
            ) from None
    numbered = {pid - 1: ranks[pid] for pid in sorted(ranks)}
    return {number: rank for number, rank in numbered.items() if rank.last > rank.first}, lost


def _sort_in(event: Event, ranks: dict[int, _Rank], rows: dict[tuple[int, int], str]) -> int:
    """Returns how many operations the event says are not shown."""
    pid, kind, name = event.get("pid", 0), event.get("ph"), event.get("name", "")
    facts = event.get("args", {})
    if kind == "M" and name == "process_name" and "rank" in facts:
        ranks.setdefault(_whole(pid), _Rank()).host = str(facts.get("host", ""))
    elif kind == "M" and name == "thread_name":
        rows[pid, event["tid"]] = str(facts.get("name", ""))
    elif kind == "i" and name == LOST:
        return _whole(facts.get("operations", 0))
    elif kind == "X" and pid in ranks:
        _take(ranks[pid], event, rows.get((pid, event["tid"]), ""))
    return 0


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _MOST:
        raise ValueError(f"{reprlib.repr(value)} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not -_MOST <= value <= _MOST:
        raise ValueError(f"{reprlib.repr(value)} is no number")
    return float(value)


def _take(rank: _Rank, event: Event, row: str) -> None:
    name, facts = str(event["name"]), event.get("args", {})
    start = _number(event["ts"])
    end = start + _number(event["dur"])
    rank.first, rank.last = min(rank.first, start), max(rank.last, end)
    if row.startswith(BUCKETS):
        rank.carried.append((start, end))
    elif "bucket" not in facts:
        if name in _WAITS:
            rank.waits.append((start, end))
        elif name == OPTIMIZER_STEP:
            rank.steps.append((start, end))
    elif facts["bucket"]:
        label = _LANE.sub("", row)
        # Unnamed ones share a row; the ranks submit them in the same order.
        before = rank.seen[facts["bucket"], label, name]
        rank.seen[facts["bucket"], label, name] += 1
        key = (facts.get("where", ""), facts["bucket"], label, before)
        if name.startswith(NEGOTIATE):
            rank.submitted[key] = start
        else:
            rank.bytes[key] = _whole(facts.get("bytes", 0))


def _window(rank: _Rank) -> Interval:
    """Without the first steps, in which memory is touched first and ranks agree on names."""
    steps = sorted(rank.steps)
    if len(steps) >= _STEPS_TO_WARM_UP + _FEW_STEPS:
        return steps[_STEPS_TO_WARM_UP - 1][1], steps[-1][1]
    return rank.first, rank.last


def _held_up(
    ranks: Mapping[int, _Rank], common: set[tuple[Any, ...]]
) -> dict[int, tuple[list[Interval], int]]:
    """By rank: when others waited for it, and how often it was the last to submit.

    From when the first rank has submitted an operation until the last has, that is the one which
    holds up those that have nothing else to do.
    """
    held: dict[int, list[Interval]] = {number: [] for number in ranks}
    last = dict.fromkeys(ranks, 0)
    for key in common if len(ranks) > 1 else ():
        times = {number: rank.submitted[key] for number, rank in ranks.items()}
        number = max(times, key=lambda number: times[number])
        held[number].append((min(times.values()), times[number]))
        last[number] += 1
    waiting = {number: _union(rank.waits) for number, rank in ranks.items()}
    return {
        number: (
            _common(
                _union(held[number]),
                _union([wait for other in ranks if other != number for wait in waiting[other]]),
            ),
            last[number],
        )
        for number in ranks
    }


def _of_rank(number: int, rank: _Rank, held_up: list[Interval], last: int) -> RankSummary:
    window = _window(rank)
    exposed = _clipped(_union(rank.waits), window)
    carried = _clipped(_union(rank.carried), window)
    both = _length(_clipped(_union([*exposed, *carried]), window))
    ends = sorted(end for _, end in rank.steps if window[0] <= end <= window[1])
    durations = [after - before for before, after in pairwise(ends)]
    return RankSummary(
        rank=number,
        host=rank.host,
        window_us=window[1] - window[0],
        exposed_us=_length(exposed),
        communication_us=_length(carried),
        hidden_us=both - _length(exposed),
        steps=len(durations),
        step_us=statistics.median(durations) if durations else 0.0,
        held_up_us=_length(_clipped(held_up, window)),
        last=last,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    low, high = window
    cut = [(max(start, low), min(end, high)) for start, end in intervals]
    return [(start, end) for start, end in cut if end > start]


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What is in both; each without overlaps, in order."""
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


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


# In words ---------------------------------------------------------------------------------------


def text(summary: Summary) -> str:
    """The summary for a terminal."""
    lines = [
        f"{'rank':>4}  {'host':<16} {'steps':>6} {'step':>9} {'compute':>8} {'waiting':>8} "
        f"{'communication':>14} {'hidden':>7} {'last':>6} {'held up':>8}"
    ]
    for rank in summary.ranks:
        waiting = _share(rank.exposed_us, rank.window_us)
        lines.append(
            f"{rank.rank:>4}  {rank.host[:16]:<16} {rank.steps or '-':>6} "
            f"{_time(rank.step_us) if rank.steps else '-':>9} "
            f"{1 - waiting:>8.1%} {waiting:>8.1%} "
            f"{_share(rank.communication_us, rank.window_us):>14.1%} "
            f"{_share(rank.hidden_us, rank.communication_us):>7.0%} "
            f"{rank.last:>6} {_share(rank.held_up_us, rank.window_us):>8.1%}"
        )
    lines += [
        "",
        "compute: the time in which the script did not wait for communication; hidden: the share",
        "of communication that went on then. last: how often the rank was the last to submit;",
        "held up: the time in which others did nothing but wait for that.",
        "",
        f"{summary.operations} operations of all ranks, {_bytes(summary.bytes)} on each.",
        *_straggler(summary.ranks),
        *_advice(summary.ranks),
    ]
    if summary.lost:
        lines.append(
            f"{summary.lost} operations are not shown: they came faster than they were read."
        )
    return "\n".join(lines)


def _straggler(ranks: Sequence[RankSummary]) -> list[str]:
    if len(ranks) < 2:
        return []
    shares = {rank.rank: _share(rank.held_up_us, rank.window_us) for rank in ranks}
    slow = max(ranks, key=lambda rank: shares[rank.rank])
    others = [shares[rank.rank] for rank in ranks if rank is not slow]
    if shares[slow.rank] - statistics.median(others) <= _LITTLE:
        return ["No straggler: the ranks wait for each other by turns, or little."]
    return [
        f"Straggler: rank {slow.rank} on {slow.host} held up others {shares[slow.rank]:.0%} of the "
        f"time (the other ranks: {statistics.median(others):.0%})."
    ]


def _advice(ranks: Sequence[RankSummary]) -> list[str]:
    """What larger batches would bring, where steps are known.

    A batch of k times the size takes k times the compute and the same communication, of which at
    best all but what is carried after the last gradient is hidden. The rank that waits least is
    the one whose compute counts: the others wait for it, too.
    """
    busy = [rank for rank in ranks if rank.steps]
    if not busy:
        return ["No optimizer steps: nothing can be said of batches."]
    rank = min(busy, key=lambda rank: rank.exposed_us / rank.window_us)
    waiting = rank.exposed_us / rank.window_us
    if waiting <= _LITTLE:
        return [f"Batches are large enough: the fastest ranks wait {waiting:.0%} of the time."]
    compute, wait = 1 - waiting, waiting
    hidden = rank.hidden_us / rank.window_us
    gains = []
    for times in (2, 4):
        # Twice the compute hides twice as much, as far as there is something to hide.
        exposed = max(wait - (times - 1) * hidden, min(wait, _LITTLE * compute))
        gains.append(f"{times} times as large, {times * compute / (times * compute + exposed):.0%}")
    return [
        f"Batches may be too small: the ranks compute {compute:.0%} of the time. With batches "
        f"{', '.join(gains)} (estimated)."
    ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _time(micros: float) -> str:
    if micros < 1e3:
        return f"{micros:.0f} us"
    return f"{micros / 1e3:.1f} ms" if micros < 1e6 else f"{micros / 1e6:.2f} s"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"

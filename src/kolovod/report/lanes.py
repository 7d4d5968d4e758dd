"""The lanes of each rank: its script, what it has submitted, and what is carried. PURE.

A page holds so many events at most: then all of those around a usual step, and elsewhere the
longest ones, which are those that can be seen from afar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kolovod.core.spans import CHOSEN, OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS
from kolovod.observe.reading import Interval, RankEvents
from kolovod.observe.trace import BUCKETS, NEGOTIATE, Event

__all__ = ["MOST_EVENTS", "Bar", "Lane", "Thinning", "lanes", "payload", "thinned"]

MOST_EVENTS = 100_000
_MOST_ROWS = 3  # for what overlaps in a lane; the rest is not shown
_MOST_NAMES = 3  # of a bucket's operations
_LANE = re.compile(r" \(\d+\)$")
SCRIPT, SUBMITTED, CARRIED = "script", "submitted", "carried"
_KINDS = {
    WAIT: "wait",
    WAIT_FOR_GRADIENTS: "wait",
    OPTIMIZER_STEP: "optimizer",
    "backward": "compute",
}


class Bar(NamedTuple):
    """One event; times in microseconds."""

    start_us: float
    end_us: float
    name: str
    kind: str
    """The kind that gives its colour: wait, optimizer, compute, own, submitted or carried."""
    bytes: int = 0
    names: str = ""
    """The operations of a bucket."""

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


@dataclass
class Lane:
    """One row of a rank, in which nothing overlaps."""

    rank: int
    kind: str
    """SCRIPT, SUBMITTED or CARRIED."""
    label: str
    bars: list[Bar] = field(default_factory=list)


class Thinning(NamedTuple):
    """The part of the events that a page leaves out."""

    events: int
    """The number of events that the timeline has."""
    shown: int
    whole: Interval
    """The interval in which all are shown; microseconds."""
    least_us: float
    """Elsewhere those are shown that take longer."""


@dataclass
class _Seen:
    """The bars of one rank, before they are in rows."""

    threads: dict[str, list[Bar]] = field(default_factory=dict)
    submitted: list[Bar] = field(default_factory=list)
    carried: list[tuple[Bar, tuple[str, int]]] = field(default_factory=list)
    members: dict[tuple[str, int], list[str]] = field(default_factory=dict)


def lanes(events: Iterable[Event], ranks: Mapping[int, RankEvents]) -> list[Lane]:
    """Return the lanes of all ranks, in order.

    ``events`` must be those that ``of_ranks`` has made ``ranks`` of.
    """
    seen = {number: _Seen() for number in ranks}
    by_pid = {number + 1: rank for number, rank in seen.items()}
    rows: dict[tuple[Any, Any], str] = {}
    for event in events:
        kind, pid = event.get("ph"), event.get("pid", 0)
        facts = event.get("args")
        facts = facts if isinstance(facts, dict) else {}
        if kind == "M" and event.get("name") == "thread_name":
            rows[pid, event["tid"]] = str(facts.get("name", ""))
        elif kind == "X" and pid in by_pid:
            _sort_in(by_pid[pid], event, facts, rows.get((pid, event["tid"]), ""))
    found: list[Lane] = []
    for number, rank in seen.items():
        found += _of_rank(number, rank)
    return found


def _sort_in(rank: _Seen, event: Event, facts: dict[str, Any], row: str) -> None:
    name, start = str(event["name"]), float(event["ts"])
    end = start + max(0.0, float(event["dur"]))
    bucket = str(facts.get("where", "")), _whole(facts.get("bucket"))
    if row.startswith(BUCKETS):
        size = _whole(facts.get("bytes"))
        rank.carried.append((Bar(start, end, name, CARRIED, size), bucket))
    elif "bucket" not in facts:
        if not name.startswith(CHOSEN):
            bar = Bar(start, end, name, _KINDS.get(name, "own"))
            rank.threads.setdefault(row, []).append(bar)
    elif name.startswith(NEGOTIATE):
        rank.submitted.append(Bar(start, end, _LANE.sub("", row), SUBMITTED))
    else:
        rank.members.setdefault(bucket, []).append(_LANE.sub("", row))


def _whole(value: Any) -> int:
    """Return 0 for what is no number above 0: ``of_ranks`` does not look at everything."""
    return value if type(value) is int and value > 0 else 0


def _of_rank(number: int, rank: _Seen) -> list[Lane]:
    found: list[Lane] = []
    for thread, bars in sorted(rank.threads.items(), key=lambda each: -len(each[1])):
        main = not found
        rows = _rows(bars)
        found += [Lane(number, SCRIPT, SCRIPT if main else thread, row) for row in rows]
    found += [Lane(number, SUBMITTED, SUBMITTED, row) for row in _rows(rank.submitted)]
    carried = [
        bar._replace(names=_listed(rank.members.get(bucket, []))) for bar, bucket in rank.carried
    ]
    return found + [Lane(number, CARRIED, CARRIED, row) for row in _rows(carried)]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(names[:_MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed


def _rows(bars: Iterable[Bar]) -> list[list[Bar]]:
    """Return rows, outer bars above what they hold; what finds no place in the last is left out."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_us, -bar.end_us)):
        for row in rows:
            if row[-1].end_us <= bar.start_us:
                row.append(bar)
                break
        else:
            if len(rows) < _MOST_ROWS:
                rows.append([bar])
    return rows


# What a page holds ------------------------------------------------------------------------------


def thinned(
    found: Sequence[Lane], around: Interval, most: int = MOST_EVENTS
) -> tuple[list[Lane], Thinning | None]:
    """Return at most ``most`` events: half for those near ``around``, half for the longest."""
    total = sum(len(lane.bars) for lane in found)
    if total <= most:
        return list(found), None
    middle = sum(around) / 2
    by_distance = sorted(_distance(bar, middle) for lane in found for bar in lane.bars)
    reach = by_distance[most // 2]
    durations = sorted(
        (bar.duration_us for lane in found for bar in lane.bars if _distance(bar, middle) >= reach),
        reverse=True,
    )
    place = min(most - most // 2, len(durations) - 1)
    least = durations[place]
    kept = [
        replace(
            lane,
            bars=[
                bar
                for bar in lane.bars
                if _distance(bar, middle) < reach or bar.duration_us > least
            ],
        )
        for lane in found
    ]
    shown = sum(len(lane.bars) for lane in kept)
    return kept, Thinning(total, shown, (middle - reach, middle + reach), least)


def _distance(bar: Bar, at_us: float) -> float:
    """Return how far its farther end is, so that what is near is in the window whole."""
    return max(abs(bar.start_us - at_us), abs(bar.end_us - at_us))


def payload(
    found: Sequence[Lane], hosts: Mapping[int, str], view: Interval, step: Interval | None
) -> dict[str, Any]:
    """Return the data for the page's script: nanoseconds, starts as differences; texts by number.

    ``view``: the interval that is shown at first; ``step``: a usual one, if there is any.
    """
    texts: dict[str, int] = {}
    kinds: dict[str, int] = {}

    def number(table: dict[str, int], text: str) -> int:
        return table.setdefault(text, len(table))

    ends = [(lane.bars[0].start_us, lane.bars[-1].end_us) for lane in found if lane.bars]
    begin = round(1000 * min((start for start, _ in ends), default=0.0))
    last = round(1000 * max((end for _, end in ends), default=0.0))
    rows = []
    for lane in found:
        before, starts = begin, []
        for bar in lane.bars:
            start = round(1000 * bar.start_us)
            starts.append(start - before)
            before = start
        row: dict[str, Any] = {
            "rank": lane.rank,
            "label": lane.label,
            "starts": starts,
            "durations": [round(1000 * bar.duration_us) for bar in lane.bars],
            "names": [number(texts, bar.name) for bar in lane.bars],
            "kinds": [number(kinds, bar.kind) for bar in lane.bars],
        }
        if lane.kind == CARRIED:
            row["bytes"] = [bar.bytes for bar in lane.bars]
            row["members"] = [number(texts, bar.names) for bar in lane.bars]
        rows.append(row)
    return {
        "begin": begin,
        "end": max(last, begin + 1),
        "view": [round(1000 * at) for at in view],
        "step": None if step is None else [round(1000 * at) for at in step],
        "texts": list(texts),
        "kinds": list(kinds),
        "hosts": [[rank, host] for rank, host in hosts.items()],
        "rows": rows,
    }

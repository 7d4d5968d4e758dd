"""The parts of a rank's time: computing, communication, waiting; in all, and by step. PURE.

The shares are of the same time as those of ``kolovod timeline``: all but the first two steps.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from kolovod.core.spans import OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS
from kolovod.observe.reading import (
    Interval,
    RankEvents,
    clipped,
    intersection,
    length,
    union,
)  # fmt: skip
from kolovod.observe.summary import common_operations, held_up, share, window
from kolovod.report.lanes import SCRIPT, Lane

__all__ = ["PARTS", "Anatomy", "Slice", "anatomies", "slices", "usual_step"]

PARTS = {
    "marked": "computing: backward, and what the script marks itself",
    "rest": "everything else of the script: input, forward, Python",
    "optimizer": "optimizer step",
    "hidden": "communication hidden behind any of these",
    "carried": "waiting while data are carried",
    "ranks": "waiting for other ranks to submit",
}
"""The parts of a rank's time: each moment is in one of them."""
_EQUAL_SLICES = 100  # where no steps are known
_WAITS = (WAIT, WAIT_FOR_GRADIENTS)


@dataclass(frozen=True)
class Anatomy:
    """The parts of one rank's time, over all its measured steps; microseconds."""

    rank: int
    parts: Mapping[str, float]
    """The time of each part, by the names in PARTS."""
    blocking_us: float
    """The time in which the script waits in a verb of its own, not for gradients."""

    @property
    def window_us(self) -> float:
        return sum(self.parts.values())

    def share(self, *names: str) -> float:
        """Return the share of the time that these parts have together."""
        return share(sum(self.parts[name] for name in names), self.window_us)

    @property
    def blocking(self) -> float:
        """The share of the time in which the script waits in a verb of its own."""
        return share(self.blocking_us, self.window_us)


def anatomies(ranks: Mapping[int, RankEvents], lanes: Sequence[Lane]) -> list[Anatomy]:
    """Return the anatomies of all ranks."""
    return [_of_rank(number, rank, lanes) for number, rank in ranks.items()]


def _of_rank(number: int, rank: RankEvents, lanes: Sequence[Lane]) -> Anatomy:
    seen = window(rank)

    def within(intervals: Iterable[Interval]) -> list[Interval]:
        return clipped(union(intervals), seen)

    script = [
        bar for lane in lanes if lane.rank == number and lane.label == SCRIPT for bar in lane.bars
    ]
    waits, carried = within(rank.waits), within(rank.carried)
    optimizer = within(rank.steps)
    taken = {*_WAITS, OPTIMIZER_STEP}
    marked = within((b.start_us, b.end_us) for b in script if b.name not in taken)
    for_gradients = within((b.start_us, b.end_us) for b in script if b.name == WAIT_FOR_GRADIENTS)
    both = length(intersection(waits, carried))
    engaged = union([*waits, *carried])
    parts = {
        "carried": both,
        "ranks": length(waits) - both,
        "hidden": length(carried) - both,
        "optimizer": length(optimizer) - length(intersection(optimizer, engaged)),
    }
    busy = union([*engaged, *optimizer])
    parts["marked"] = length(marked) - length(intersection(marked, busy))
    parts["rest"] = max(0.0, seen[1] - seen[0] - sum(parts.values()))
    blocking = length(waits) - length(intersection(waits, for_gradients))
    return Anatomy(number, {name: parts[name] for name in PARTS}, blocking)


# Over time --------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """One step, or several of many; microseconds."""

    first: int
    """The number of the first step, from 1; without steps, of the part of the time."""
    last: int
    start_us: float
    end_us: float
    hidden_us: float
    """The hidden time of a step; this and the rest are means of all ranks."""
    carried_us: float
    """The time in which they waited while data were carried."""
    ranks_us: float
    """The time in which they waited for others."""
    held_up: Mapping[int, float]
    """For each rank, the share of the time in which others did nothing but wait for it."""

    @property
    def step_us(self) -> float:
        return (self.end_us - self.start_us) / (self.last - self.first + 1)


class _Covered:
    """The covered time up to a moment, prepared for many questions."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        merged = union(intervals)
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]
        self._sums = [0.0, *accumulate(end - start for start, end in merged)]

    def within(self, start_us: float, end_us: float) -> float:
        return self._until(end_us) - self._until(start_us)

    def _until(self, at_us: float) -> float:
        i = bisect_right(self._starts, at_us)
        return self._sums[i] - max(0.0, self._ends[i - 1] - at_us) if i else 0.0


def slices(ranks: Mapping[int, RankEvents], most: int) -> tuple[list[Slice], bool]:
    """Return at most ``most`` slices of equal numbers of steps, and whether there are steps at all.

    Steps are those of the first rank that has some: the ranks of a training step together.
    """
    windows, are_steps = _windows(ranks)
    every = -(-len(windows) // most)
    groups = [windows[i : i + every] for i in range(0, len(windows), every)]
    waits = {number: _Covered(rank.waits) for number, rank in ranks.items()}
    carried = {number: _Covered(rank.carried) for number, rank in ranks.items()}
    both = {
        number: _Covered(intersection(union(rank.waits), union(rank.carried)))
        for number, rank in ranks.items()
    }
    held = {
        number: _Covered(intervals)
        for number, (intervals, _) in held_up(ranks, common_operations(ranks)).items()
    }
    found = []
    for group in groups:
        first, start, end = group[0][0], group[0][1], group[-1][2]
        count = len(group)

        def mean(covered: Mapping[int, _Covered]) -> float:
            each = (one.within(start, end) for one in covered.values())  # noqa: B023
            return sum(each) / len(covered) / count  # noqa: B023

        waited, under_way, exposed = mean(waits), mean(carried), mean(both)
        shares = {
            number: one.within(start, end) / max(end - start, 1e-3) for number, one in held.items()
        }
        found.append(
            Slice(first, first + count - 1, start, end, under_way - exposed, exposed,
                  waited - exposed, shares)
        )  # fmt: skip
    return found, are_steps


def _windows(ranks: Mapping[int, RankEvents]) -> tuple[list[tuple[int, float, float]], bool]:
    """Return number, begin and end of each step, or part of the time; and whether it is steps."""
    for rank in ranks.values():
        begin, end = window(rank)
        ends = sorted({at for _, at in rank.steps})
        found = [
            (number, before, after)
            for number, (before, after) in enumerate(pairwise(ends), 2)
            if before >= begin and after <= end
        ]
        if found:
            return found, True
    begin = min(rank.first for rank in ranks.values())
    end = max(rank.last for rank in ranks.values())
    wide = (end - begin) / _EQUAL_SLICES
    return [(i + 1, begin + i * wide, begin + (i + 1) * wide) for i in range(_EQUAL_SLICES)], False


def usual_step(ranks: Mapping[int, RankEvents]) -> Interval | None:
    """Return a step that took as long as the median; None without steps."""
    windows, are_steps = _windows(ranks)
    if not are_steps:
        return None
    middle = statistics.median_low(end - start for _, start, end in windows)
    return next((start, end) for _, start, end in windows if end - start == middle)

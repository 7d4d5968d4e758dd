"""A summary of a timeline: where a training's time goes, and which rank is slow. PURE.

It is made from the spans and operations of each rank (trace.py):

- *exposed*: the time in which the script did nothing but wait for communication; all other time is
  compute (or input, or whatever else the script did);
- *communication*: the time in which the engine carried something; what of it is not exposed was
  *hidden* behind compute;
- the *straggler*: the rank that submitted last while others did nothing but wait for it;
- a step ends where an optimizer step does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kolovod.observe.reading import (
    Events,
    Interval,
    RankEvents,
    clipped,
    count_steps,
    intersection,
    length,
    of_ranks,
    read,
    union,
)  # fmt: skip
from kolovod.observe.trace import Event
from kolovod.observe.units import bytes_text, time_text

__all__ = [
    "RankSummary", "Straggler", "Summary", "batch_gains", "batches", "common_operations",
    "find_straggler", "held_up", "of", "read", "share", "straggler", "summarize", "text", "window",
]  # fmt: skip

_STEPS_TO_WARM_UP = 2
_FEW_STEPS = 3
_LITTLE = 0.05  # of a step: not worth an advice

Key = tuple[Any, ...]


@dataclass(frozen=True)
class RankSummary:
    """The summary of one rank; times in microseconds, in a window without the first steps."""

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
    """The time in which another rank did nothing but wait, and this one was the last to submit."""
    last: int
    """The number of times that it was the last to submit."""


@dataclass(frozen=True)
class Summary:
    """The summary of all ranks."""

    ranks: list[RankSummary]
    operations: int
    """The number of operations that all ranks took part in."""
    bytes: int
    """The bytes of these operations, on one rank."""
    lost: int
    """Operations that the timeline does not show."""
    counted_by: str
    """The operation by which steps are counted, see ``Events``."""
    choices: list[tuple[float, str]]
    """The choices (bucket sizes), and their reasons; seconds since the timeline begins."""


def summarize(events: Iterable[Event]) -> Summary:
    """Add up the events of a trace. Raises InvalidArgumentError if they are not Kolovod's."""
    found = of_ranks(events)
    count_steps(found)
    return of(found)


def of(found: Events) -> Summary:
    """Add up what the ranks did, one rank at least."""
    ranks = found.ranks
    common = common_operations(ranks)
    held = held_up(ranks, common)
    return Summary(
        [_of_rank(number, rank, *held[number]) for number, rank in ranks.items()],
        len(common),
        sum(op.bytes for key, op in ranks[min(ranks)].operations.items() if key in common),
        found.lost,
        found.counted_by,
        _choices(ranks),
    )


def _choices(ranks: Mapping[int, RankEvents]) -> list[tuple[float, str]]:
    begin = min(rank.first for rank in ranks.values())
    found = (choice for rank in ranks.values() for choice in rank.choices)
    return [((at - begin) / 1e6, what) for at, what in sorted(found)]


def common_operations(ranks: Mapping[int, RankEvents]) -> set[Key]:
    """Return the operations that all ranks have submitted."""
    return set.intersection(*(set(rank.submitted) for rank in ranks.values()))


def window(rank: RankEvents) -> Interval:
    """Return the time that counts: after the first steps, if enough others are left.

    In these memory is touched first, and ranks agree on names.
    """
    steps = sorted(rank.steps)
    if len(steps) >= _STEPS_TO_WARM_UP + _FEW_STEPS:
        return steps[_STEPS_TO_WARM_UP - 1][1], steps[-1][1]
    return rank.first, rank.last


def held_up(
    ranks: Mapping[int, RankEvents], common: set[Key]
) -> dict[int, tuple[list[Interval], int]]:
    """Return, for each rank, when others waited for it, and how often it was the last to submit.

    From the time at which the first rank has submitted an operation until the last one has, that
    last rank holds up those that have nothing else to do.
    """
    held: dict[int, list[Interval]] = {number: [] for number in ranks}
    last = dict.fromkeys(ranks, 0)
    for key in common if len(ranks) > 1 else ():
        times = {number: rank.submitted[key] for number, rank in ranks.items()}
        number = max(times, key=lambda number: times[number])
        held[number].append((min(times.values()), times[number]))
        last[number] += 1
    waiting = {number: union(rank.waits) for number, rank in ranks.items()}
    return {
        number: (
            intersection(
                union(held[number]),
                union([wait for other in ranks if other != number for wait in waiting[other]]),
            ),
            last[number],
        )
        for number in ranks
    }


def _of_rank(number: int, rank: RankEvents, held: list[Interval], last: int) -> RankSummary:
    begin, end = seen = window(rank)
    exposed = clipped(union(rank.waits), seen)
    carried = clipped(union(rank.carried), seen)
    both = length(clipped(union([*exposed, *carried]), seen))
    ends = sorted(at for _, at in rank.steps if begin <= at <= end)
    durations = [after - before for before, after in pairwise(ends)]
    return RankSummary(
        rank=number,
        host=rank.host,
        window_us=end - begin,
        exposed_us=length(exposed),
        communication_us=length(carried),
        hidden_us=both - length(exposed),
        steps=len(durations),
        step_us=statistics.median(durations) if durations else 0.0,
        held_up_us=length(clipped(held, seen)),
        last=last,
    )


# In words ---------------------------------------------------------------------------------------


def text(summary: Summary) -> str:
    """Return the summary for a terminal."""
    lines = [
        f"{'rank':>4}  {'host':<16} {'steps':>6} {'step':>9} {'compute':>8} {'waiting':>8} "
        f"{'communication':>14} {'hidden':>7} {'last':>6} {'held up':>8}"
    ]
    for rank in summary.ranks:
        waiting = share(rank.exposed_us, rank.window_us)
        lines.append(
            f"{rank.rank:>4}  {rank.host[:16]:<16} {rank.steps or '-':>6} "
            f"{time_text(rank.step_us) if rank.steps else '-':>9} "
            f"{1 - waiting:>8.1%} {waiting:>8.1%} "
            f"{share(rank.communication_us, rank.window_us):>14.1%} "
            f"{share(rank.hidden_us, rank.communication_us):>7.0%} "
            f"{rank.last:>6} {share(rank.held_up_us, rank.window_us):>8.1%}"
        )
    lines += [
        "",
        "compute: the time in which the script did not wait for communication; hidden: the share",
        "of communication that went on then. last: how often the rank was the last to submit;",
        "held up: the time in which others did nothing but wait for that.",
        "",
        f"{summary.operations} operations of all ranks, {bytes_text(summary.bytes)} on each.",
        *_counted(summary),
        *straggler(summary.ranks),
        *batches(summary.ranks),
        *(f"Chosen after {at_s:.1f} s: {what}." for at_s, what in summary.choices),
    ]
    if summary.lost:
        lines.append(
            f"{summary.lost} operations are not shown: they came faster than they were read."
        )
    return "\n".join(lines)


def _counted(summary: Summary) -> list[str]:
    if not summary.counted_by:
        return []
    return [
        "No optimizer of Kolovod's tells where steps end: they are counted by "
        f"{summary.counted_by}."
    ]


# Verdicts ---------------------------------------------------------------------------------------


class Straggler(NamedTuple):
    """The rank that holds up others more than the rest do."""

    rank: RankSummary
    share: float
    """Its share of the time."""
    others: float
    """The median of the other ranks."""


def find_straggler(ranks: Sequence[RankSummary]) -> Straggler | None:
    """Return the straggler, if there is one."""
    if len(ranks) < 2:
        return None
    shares = {rank.rank: share(rank.held_up_us, rank.window_us) for rank in ranks}
    slow = max(ranks, key=lambda rank: shares[rank.rank])
    others = statistics.median(shares[rank.rank] for rank in ranks if rank is not slow)
    most = shares[slow.rank]
    return Straggler(slow, most, others) if most - others > _LITTLE else None


def straggler(ranks: Sequence[RankSummary]) -> list[str]:
    """Return a sentence on whether a rank holds up the others; [] for a single rank."""
    if len(ranks) < 2:
        return []
    found = find_straggler(ranks)
    if found is None:
        return ["No straggler: the ranks wait for each other by turns, or little."]
    return [
        f"Straggler: rank {found.rank.rank} on {found.rank.host} held up others {found.share:.0%} "
        f"of the time (the other ranks: {found.others:.0%})."
    ]


def batch_gains(ranks: Sequence[RankSummary]) -> dict[int, float]:
    """Return the share of the time in which ranks compute: now (1), with larger batches (2, 4).

    It is empty where no steps are known. A batch of k times the size takes k times the compute and
    the same communication, of which at best all but what is carried after the last gradient is
    hidden. The rank that waits least is the one whose compute counts: the others wait for it, too.
    """
    busy = [rank for rank in ranks if rank.steps]
    if not busy:
        return {}
    rank = min(busy, key=lambda rank: share(rank.exposed_us, rank.window_us))
    wait = share(rank.exposed_us, rank.window_us)
    compute, hidden = 1 - wait, share(rank.hidden_us, rank.window_us)
    gains = {1: compute}
    for times in (2, 4):
        # Twice the compute hides twice as much, as far as there is something to hide.
        exposed = max(wait - (times - 1) * hidden, min(wait, _LITTLE * compute))
        gains[times] = share(times * compute, times * compute + exposed)
    return gains


def batches(ranks: Sequence[RankSummary]) -> list[str]:
    """Return a sentence on what larger batches would bring."""
    gains = batch_gains(ranks)
    if not gains:
        return ["No optimizer steps: nothing can be said of batches."]
    if not any(rank.exposed_us for rank in ranks):
        return ["When the script waits is not seen here: nothing can be said of batches."]
    if 1 - gains[1] <= _LITTLE:
        return [f"Batches are large enough: the fastest ranks wait {1 - gains[1]:.0%} of the time."]
    larger = ", ".join(f"{times} times as large, {gains[times]:.0%}" for times in (2, 4))
    return [
        f"Batches may be too small: the ranks compute {gains[1]:.0%} of the time. With batches "
        f"{larger} (estimated)."
    ]


def share(part: float, whole: float) -> float:
    """Return ``part / whole``; 0 of nothing."""
    return part / whole if whole else 0.0

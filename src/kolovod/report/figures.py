"""All that a report says of a timeline, before it is a page. PURE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kolovod.errors import InvalidArgumentError
from kolovod.observe import summary as summaries
from kolovod.observe.reading import Events, Interval, count_steps, of_ranks
from kolovod.observe.summary import Summary
from kolovod.observe.trace import Event
from kolovod.planning import plan as planning
from kolovod.planning.asked import Asked
from kolovod.planning.costs import wire_bytes
from kolovod.planning.measured import Measured, measured_sorted
from kolovod.planning.plan import Plan
from kolovod.report import tables
from kolovod.report.advice import Advice, advice, verdict
from kolovod.report.anatomy import Anatomy, Slice, anatomies, slices, usual_step
from kolovod.report.lanes import Thinning, lanes, payload, thinned

__all__ = ["Figures", "figures"]

_MOST_SLICES = 200
_STEPS_SHOWN = 3  # at first, in the lanes


@dataclass(frozen=True)
class Figures:
    """The figures of one timeline."""

    file: str
    recorded_s: float
    """The time of recording, in seconds since 1970; 0 unknown."""
    duration_us: float
    summary: Summary
    found: Events
    verdict: str
    advice: Sequence[Advice]
    anatomies: Sequence[Anatomy]
    slices: Sequence[Slice]
    are_steps: bool
    """True: slices are steps; else they are equal parts of the time."""
    lanes: Mapping[str, Any]
    """The lanes for the script of the page."""
    thinning: Thinning | None
    operations: Sequence[tables.OperationRow]
    buckets: Sequence[tables.BucketRow]
    hosts: Sequence[tables.HostRow]
    measured: Measured | None
    """None where a plan needs more than there is."""
    plan: Plan | None
    no_plan: str
    """Why there is none."""

    @property
    def sent_bytes(self) -> float:
        """The bytes that a host sends to others in a step, by the algorithm of the engine."""
        if self.measured is None or self.measured.cluster.hosts < 2:
            return 0.0
        cluster = self.measured.cluster
        requests = self.measured.step.requests
        return sum(wire_bytes(r.bytes, r.dtype, r.codec, cluster) for r in requests)


def figures(file: str, events: Sequence[Event], asked: Asked) -> Figures:
    """Return the figures of the events in ``file``.

    Raises InvalidArgumentError if they are not Kolovod's. ``asked``: what is to be estimated.
    """
    found = of_ranks(events)
    seen, plan, here, reason = _plans(file, found, asked)  # of steps that are told only
    count_steps(found)
    ranks = found.ranks
    summary = summaries.of(found)
    rows = lanes(events, ranks)
    parts = anatomies(ranks, rows)
    by_slice, are_steps = slices(ranks, _MOST_SLICES)
    step = usual_step(ranks)
    begin = min(rank.first for rank in ranks.values())
    end = max(rank.last for rank in ranks.values())
    around = step or (begin, begin + (end - begin) / 10)
    kept, thinning = thinned(rows, around)
    return Figures(
        file=file,
        recorded_s=_recorded_s(events),
        duration_us=end - begin,
        summary=summary,
        found=found,
        verdict=verdict(summary, parts),
        advice=advice(summary, parts, here),
        anatomies=parts,
        slices=by_slice,
        are_steps=are_steps,
        lanes=payload(kept, _hosts_of(found), _view(around), step),
        thinning=thinning,
        operations=tables.operations(ranks),
        buckets=tables.buckets(ranks),
        hosts=tables.hosts(ranks),
        measured=seen,
        plan=plan,
        no_plan=reason,
    )


def _plans(
    file: str, found: Events, asked: Asked
) -> tuple[Measured | None, Plan | None, Plan | None, str]:
    """Return what was measured, the plan that is asked for, that of the run itself, and why not."""
    try:
        seen = measured_sorted(found)
    except InvalidArgumentError as error:
        return None, None, None, str(error)
    here = planning.make(seen, [seen.cluster.hosts])
    try:
        return seen, asked.plan(file, seen), here, ""
    except InvalidArgumentError as error:
        return seen, None, here, str(error)


def _hosts_of(found: Events) -> dict[int, str]:
    return {number: rank.host for number, rank in found.ranks.items()}


def _view(around: Interval) -> Interval:
    """Return the interval of the step and its neighbours."""
    more = (around[1] - around[0]) * (_STEPS_SHOWN - 1) / 2
    return around[0] - more, around[1] + more


def _recorded_s(events: Iterable[Event]) -> float:
    for event in events:
        facts = event.get("args")
        if event.get("name") == "process_name" and isinstance(facts, dict):
            micros = facts.get("start_time_since_epoch_in_micros")
            if type(micros) is int and 0 < micros < 1 << 62:
                return micros / 1e6
    return 0.0

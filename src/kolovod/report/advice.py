"""Advice on what to do first, in sentences with figures; the most valuable first. PURE.

The figures are those of ``kolovod timeline`` and ``kolovod plan``. What an advice could bring is
the share of a step that there would not be without what it is about: an upper bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kolovod.observe.summary import (
    RankSummary,
    Summary,
    batch_gains,
    batches,
    find_straggler,
    share,
    straggler,
)  # fmt: skip
from kolovod.observe.units import time_text
from kolovod.planning.plan import Plan
from kolovod.report.anatomy import Anatomy

__all__ = ["Advice", "advice", "verdict"]

_LITTLE = 0.05  # of a step: not worth an advice
_LITTLE_HIDDEN = 0.25  # of communication
_LARGE_MISS = 0.15  # of the model in the run that it was made from
_FEW_STEPS = 10


class Advice(NamedTuple):
    """One item of the list."""

    title: str
    """The thing to do."""
    reasons: tuple[str, ...]
    """Sentences with figures."""
    gain: float = 0.0
    """The share of a step that it could save at most; 0: it saves none itself."""


_OF_BOTTLENECKS = {
    "link": "Send less between hosts, or over faster links",
    "latency": "Send fewer messages, each with more in it",
    "cores": "Give the ranks more cores, or start fewer on each machine",
    "stragglers": "Make the work of the ranks alike from step to step",
}
_WHERE_TO_LOOK = (
    "Look at samples of different lengths, at input that is read in between, and at other load on "
    "the hosts."
)


def verdict(summary: Summary, parts: Sequence[Anatomy]) -> str:
    """Return one sentence on where the time goes: the mean of the ranks."""
    waiting = statistics.fmean(each.share("carried", "ranks") for each in parts)
    others = statistics.fmean(each.share("ranks") for each in parts)
    times = [rank.step_us for rank in summary.ranks if rank.steps]
    step = f"A step takes {time_text(statistics.median(times))}. " if times else ""
    said = f"{step}The ranks compute {1 - waiting:.0%} of the time and wait {waiting:.0%} of it"
    if len(parts) < 2:
        return f"{said}."
    return f"{said}: {waiting - others:.0%} while data are carried, {others:.0%} for other ranks."


def advice(summary: Summary, parts: Sequence[Anatomy], plan: Plan | None) -> list[Advice]:
    """Return the advice. ``plan``: of the run as it was, with a single row, if it can be made."""
    found = [
        *_of_straggler(summary),
        *_of_blocking(parts),
        *_of_hiding(summary, parts),
        *_of_batches(summary.ranks),
        *_of_plan(plan, find_straggler(summary.ranks) is not None),
    ]
    found.sort(key=lambda each: -each.gain)
    return (found or [_otherwise(summary, parts)]) + _of_recording(summary)


def _otherwise(summary: Summary, parts: Sequence[Anatomy]) -> Advice:
    """Return the advice if nothing is found."""
    waiting = statistics.fmean(each.share("carried", "ranks") for each in parts)
    if waiting <= _LITTLE:
        title = "Leave communication as it is: it holds the ranks up little"
    else:
        title = "Look into the lanes for what the ranks wait for"
    return Advice(title, (*batches(summary.ranks), *straggler(summary.ranks)))


def _of_straggler(summary: Summary) -> list[Advice]:
    found = find_straggler(summary.ranks)
    if found is None:
        return []
    slow = found.rank
    computing = {r.rank: 1 - share(r.exposed_us, r.window_us) for r in summary.ranks}
    middle = statistics.median(computing[r.rank] for r in summary.ranks if r is not slow)
    more = share(computing[slow.rank], middle) - 1
    if more > _LITTLE:
        why = (
            f"It computes {more:.0%} longer than the median of the others: look for other load on "
            "its host, a limit of power or cores (`kolovod doctor -H ...` compares hosts), and for "
            "larger input."
        )
    else:
        why = (
            "It does not compute longer in all, so it is late at some moments only: look at what "
            "it alone does between steps, such as logging, checkpoints or reading input."
        )
    return [
        Advice(
            f"Find out why rank {slow.rank} on {slow.host} is late",
            (
                *straggler(summary.ranks),
                f"It was the last to submit {slow.last} of {summary.operations} operations.",
                why,
                *(_by_speed(slow, computing) if more > _LITTLE else ()),
            ),
            found.share - found.others,
        )
    ]


def _by_speed(slow: RankSummary, computing: Mapping[int, float]) -> tuple[str, ...]:
    """Return a sentence on what shares of samples by the ranks' speeds would bring, if anything.

    ``computing``: the share of its time for each rank, which has as many samples as the others.
    """
    if not all(computing.values()):
        return ()
    speed = sum(1 / each for each in computing.values())
    part, longest = 1 / computing[slow.rank] / speed, max(computing.values())
    return (
        "If it stays slower, share the samples of a step by speed (`ElasticSampler(..., "
        f"by_speed=True)`): rank {slow.rank} would have {part:.0%} of them instead of "
        f"{1 / len(computing):.0%}, and the longest computing would be "
        f"{len(computing) / speed / longest:.0%} of today's.",
    )


def _of_blocking(parts: Sequence[Anatomy]) -> list[Advice]:
    blocking = statistics.fmean(each.blocking for each in parts)
    if blocking <= _LITTLE:
        return []
    return [
        Advice(
            "Let the script go on while operations of its own are carried",
            (
                f"It waits {blocking:.0%} of the time in operations that are no gradients, such as "
                "`allreduce` of a loss.",
                "Use the verb that ends in `_async` (of `torch.distributed`, `async_op=True`) and "
                "wait for its handle a step later, or do it every hundredth step.",
            ),
            blocking,
        )
    ]


def _of_hiding(summary: Summary, parts: Sequence[Anatomy]) -> list[Advice]:
    """Return advice only where the gradients' optimizer waits: what blocks is another advice."""
    communication = sum(rank.communication_us for rank in summary.ranks)
    hidden = sum(rank.hidden_us for rank in summary.ranks)
    exposed = statistics.fmean(each.share("carried") for each in parts)
    blocking = statistics.fmean(each.blocking for each in parts)
    hideable = min(exposed, statistics.fmean(each.share("marked") for each in parts))
    part = share(hidden, communication)
    if part >= _LITTLE_HIDDEN or hideable - blocking <= _LITTLE:
        return []
    return [
        Advice(
            "Hide communication behind backward",
            (
                f"{part:.0%} of communication goes on while ranks compute; they wait "
                f"{exposed:.0%} of the time while data are carried.",
                "Gradients leave during backward if they are in several buckets: `kolovod run "
                "--autotune` tries other sizes and keeps the fastest; those of "
                "DistributedDataParallel are of `bucket_cap_mb`.",
            ),
            hideable - blocking,
        )
    ]


def _of_batches(ranks: Sequence[RankSummary]) -> list[Advice]:
    gains = batch_gains(ranks)
    if not gains or 1 - gains[1] <= _LITTLE:
        return []
    # Of the time for as many samples.
    return [Advice("Try larger batches", tuple(batches(ranks)), 1 - gains[1] / gains[2])]


def _of_plan(plan: Plan | None, has_straggler: bool) -> list[Advice]:
    if plan is None:
        return []
    (row,) = plan.rows
    gain = row.gains.get(row.bottleneck, 0.0)
    if gain <= _LITTLE or (row.bottleneck == "stragglers" and has_straggler):
        return []
    reasons = plan.advice
    if row.bottleneck == "stragglers":
        reasons += (_WHERE_TO_LOOK,)
    if abs(plan.miss) > _LARGE_MISS:
        reasons += (
            f"The model of `kolovod plan` misses the measured step by {plan.miss:+.0%}, so take "
            "this as a hint.",
        )
    return [Advice(_OF_BOTTLENECKS[row.bottleneck], reasons, gain)]


def _of_recording(summary: Summary) -> list[Advice]:
    """Return advice that would make the next report better."""
    found = []
    steps = min(rank.steps for rank in summary.ranks)
    if not steps:
        found.append(
            Advice(
                "Record where steps end",
                (
                    "This timeline has no optimizer steps: a script without Kolovod's optimizer "
                    'says with `with kolovod.span("optimizer step"):` where each step ends.',
                ),
            )
        )
    elif steps < _FEW_STEPS:
        text = f"This timeline has {steps} whole steps without the first ones: its figures vary."
        found.append(Advice("Record more steps", (text,)))
    if summary.lost:
        text = f"{summary.lost} operations are not in this timeline: they came faster than read."
        found.append(Advice("Take the counts with care", (text,)))
    return found

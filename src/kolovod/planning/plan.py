"""Predictions of a training elsewhere, their reasons, and advice. PURE.

The interval of a prediction is that in which the model would have the middle eight tenths of the
steps: as far from the prediction as these were from their median, together with what the model
missed of the measured run (the root of the sum of squares). Beyond four times the ranks that were
measured on, or four times the rate of the link, a prediction is *extrapolated*: then each further
fourfold adds as much again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kolovod.observe.units import rate_text, time_text
from kolovod.planning.changes import Change, batched, compressed
from kolovod.planning.costs import Cluster, Costs, Link
from kolovod.planning.measured import Measured
from kolovod.planning.model import Outcome, Step, alone_s, simulate, with_cores, without_stragglers

__all__ = ["BOTTLENECKS", "Plan", "Row", "Variant", "make"]

BOTTLENECKS = ("compute", "link", "latency", "cores", "stragglers")
BEYOND = 4.0
"""Times what was measured: a prediction is extrapolated beyond."""
_LITTLE = 0.03  # of a step: what gains less holds nobody up
_WORTH = 0.05  # of a step: what an advice should bring at least
_LEAST_MISS = 0.02  # of the model, whatever it says of the measured run
_TENTH = 0.1
_GOOD = 0.9  # an efficiency


@dataclass(frozen=True)
class Variant:
    """A variant of the training: as it is, or with changes."""

    name: str
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Row:
    """A prediction; seconds."""

    hosts: int
    ranks: int
    variant: str
    step_s: float
    low_s: float
    high_s: float
    alone_s: float
    """A step of one rank by itself."""
    bottleneck: str
    """One of BOTTLENECKS."""
    gains: Mapping[str, float]
    """For each bottleneck, the share of the step that there would not be without it."""
    beyond: str
    """Why it is extrapolated; "" if it is not."""

    @property
    def efficiency(self) -> float:
        """A step of one rank over this one."""
        return self.alone_s / self.step_s

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the efficiency."""
        return self.alone_s / self.high_s, self.alone_s / self.low_s


@dataclass(frozen=True)
class Plan:
    """All predictions from one timeline."""

    measured: Measured
    link: Link
    is_link_given: bool
    variants: tuple[Variant, ...]
    rows: tuple[Row, ...]
    """The predictions, ordered by variant, then by hosts."""
    advice: tuple[str, ...]

    @property
    def miss(self) -> float:
        """The model's error in the measured run: its step over the measured one, less 1."""
        return self.measured.modelled_s / self.measured.step_s - 1


def make(
    measured: Measured,
    hosts: Sequence[int],
    *,
    link: Link | None = None,
    changes: Sequence[Change] = (),
) -> Plan:
    """Predict for each of ``hosts``; with ``changes`` also with all of these together.

    ``link``: another than what was measured. Without any, predictions of several hosts are those of
    the link in ``measured``, which must know it.
    """
    variants = [Variant("as measured")]
    if changes:
        variants.append(Variant(", ".join(change.text for change in changes), tuple(changes)))
    used = link or measured.cluster.link
    rows = [_row(measured, used, number, variant) for variant in variants for number in hosts]
    advice = _advice(measured, used, rows[-1], variants[-1])
    return Plan(measured, used, link is not None, tuple(variants), tuple(rows), advice)


def _case(
    measured: Measured, link: Link, hosts: int, changes: Sequence[Change]
) -> tuple[Step, Cluster]:
    """Return the step and the cluster to simulate. Hosts that shared one machine go on to do so."""
    was = measured.cluster
    is_one_machine = was.hosts_per_machine == was.hosts > 1
    together = hosts if is_one_machine else was.hosts_per_machine
    cluster = replace(was, hosts=hosts, link=link, hosts_per_machine=together)
    step = measured.step
    for change in changes:
        step = change.of_step(step, measured.costs)
        cluster = change.of_cluster(cluster)
    return step, cluster


def _row(measured: Measured, link: Link, hosts: int, variant: Variant) -> Row:
    step, cluster = _case(measured, link, hosts, variant.changes)
    step_s = simulate(step, cluster, measured.costs).step_s
    factor, beyond = _beyond(measured, cluster)
    low, high = _spread(measured, factor)
    gains = _gains(step, cluster, measured.costs, step_s)
    worst = max(gains, key=lambda name: gains[name])
    return Row(
        hosts,
        cluster.ranks,
        variant.name,
        step_s,
        step_s * low,
        step_s * high,
        alone_s(step, cluster.cores),
        worst if gains[worst] > _LITTLE else "compute",
        gains,
        beyond,
    )


def _beyond(measured: Measured, cluster: Cluster) -> tuple[float, str]:
    """Return how many times as large this is as what was measured, and in what."""
    ranks = cluster.ranks / measured.cluster.ranks
    rate = 1.0
    if measured.knows_link and cluster.hosts > 1:
        rate = cluster.link.bytes_per_s / measured.cluster.link.bytes_per_s
    reasons = [
        f"{factor:.3g} times {what}"
        for factor, what in ((ranks, "the ranks"), (rate, "the rate of the link"))
        if factor > BEYOND
    ]
    return max(ranks, rate), " and ".join(reasons)


def _spread(measured: Measured, factor: float) -> tuple[float, float]:
    """Return the two factors that make a prediction the ends of its interval."""
    ordered, middle = sorted(measured.steps_s), measured.step_s
    share = _TENTH * (len(ordered) - 1)
    low, high = ordered[math.floor(share)] / middle, ordered[-1 - math.floor(share)] / middle
    miss = max(abs(measured.modelled_s / middle - 1), _LEAST_MISS)
    wider = max(1.0, math.log(max(factor, 1.0), BEYOND))
    below = wider * math.hypot(1 - low, miss)
    above = wider * math.hypot(high - 1, miss)
    return 1 / (1 + below), 1 + above


def _gains(step: Step, cluster: Cluster, costs: Costs, step_s: float) -> dict[str, float]:
    """Return the share of a step that would not be there without each of the bottlenecks."""
    link = cluster.link
    endless, instant = replace(link, bytes_per_s=math.inf), replace(link, latency_s=0.0)
    others = {
        "link": (step, replace(cluster, link=endless), costs),
        "latency": (step, replace(cluster, link=instant), replace(costs, operation_s=0.0)),
        "cores": (step, with_cores(cluster), costs.times(0.0)),
        "stragglers": (without_stragglers(step), cluster, costs),
    }
    return {name: max(0.0, 1 - simulate(*other).step_s / step_s) for name, other in others.items()}


# Advice -----------------------------------------------------------------------------------------


def _advice(measured: Measured, link: Link, row: Row, variant: Variant) -> tuple[str, ...]:
    """Return what would help at the largest size, in sentences; the best first."""
    step, cluster = _case(measured, link, row.hosts, variant.changes)
    where = f"On {row.hosts} hosts" if row.hosts > 1 else "On one host"
    if row.bottleneck == "compute":
        return (
            f"{where} ranks compute {row.efficiency:.0%} of the time: nothing about communication "
            "holds them up.",
        )
    said = [_SAYINGS[row.bottleneck](measured, where, row)]
    said += _remedies(measured, step, cluster, row)
    return tuple(said)


def _of_link(measured: Measured, where: str, row: Row) -> str:
    return (
        f"{where} the links between hosts hold ranks up: a step would be {row.gains['link']:.0%} "
        "shorter with endless ones."
    )


def _of_latency(measured: Measured, where: str, row: Row) -> str:
    return (
        f"{where} ranks wait for messages on their way, not for bytes: {row.gains['latency']:.0%} "
        "of a step."
    )


def _of_cores(measured: Measured, where: str, row: Row) -> str:
    return (
        f"{where} cores are short: {row.gains['cores']:.0%} of a step. Computing and communication "
        "share them."
    )


def _of_stragglers(measured: Measured, where: str, row: Row) -> str:
    step = measured.step
    said = f"{where} ranks wait for the slowest one {row.gains['stragglers']:.0%} of a step"
    if step.skew - 1 > _LITTLE:
        return (
            f"{said}: {measured.slowest} computes {step.skew - 1:.0%} longer than the median one."
        )
    return f"{said}: what a rank computes varies by {step.jitter:.0%} from step to step."


_SAYINGS: dict[str, Callable[[Measured, str, Row], str]] = {
    "link": _of_link,
    "latency": _of_latency,
    "cores": _of_cores,
    "stragglers": _of_stragglers,
}


def _remedies(measured: Measured, step: Step, cluster: Cluster, row: Row) -> list[str]:
    """Return the remedies that bring enough, in sentences, the best first."""
    costs = measured.costs

    def outcome(other: Step, elsewhere: Cluster) -> Outcome:
        return simulate(other, elsewhere, costs)

    found: list[tuple[float, str]] = []
    for name in ("bf16", "int8", "int4") if cluster.hosts > 1 else ():
        step_s = outcome(compressed(step, name, costs), cluster).step_s
        took = f"{time_text(1e6 * step_s)} instead of {time_text(1e6 * row.step_s)}"
        found.append((1 - step_s / row.step_s, f"With compression={name} a step takes {took}."))
    double = batched(step, 2.0)
    efficiency = alone_s(double, cluster.cores) / outcome(double, cluster).step_s
    text = f"With batches twice as large the efficiency is {efficiency:.1%}, not "
    found.append((1 - row.efficiency / efficiency, f"{text}{row.efficiency:.1%}."))
    found.sort(key=lambda each: -each[0])
    texts = [text for gain, text in found if gain > _WORTH]
    if row.bottleneck == "link" and (rate := _rate_for(step, cluster, costs)) is not None:
        texts.append(f"With links of {rate_text(rate)} the efficiency is {_GOOD:.0%} or more.")
    if row.bottleneck == "cores" and (cores := _cores_for(step, cluster, costs)) is not None:
        where = "the machine" if cluster.hosts_per_machine > 1 else "each host"
        texts.append(f"{cores:g} cores in {where} would be enough ({cluster.cores:g} there are).")
    return texts


def _rate_for(step: Step, cluster: Cluster, costs: Costs) -> float | None:
    """Return a rate of links (bytes per second) that makes a step efficient; None: none is seen.

    It is the least of those that are a power of two times the present one.
    """
    rate = cluster.link.bytes_per_s
    alone = alone_s(step, cluster.cores)
    for _ in range(10):
        rate *= 2
        faster = replace(cluster, link=replace(cluster.link, bytes_per_s=rate))
        if alone / simulate(step, faster, costs).step_s >= _GOOD:
            return rate
    return None


def _cores_for(step: Step, cluster: Cluster, costs: Costs) -> float | None:
    """Return how many cores of a machine are enough: more bring little; None: none is seen."""
    most = simulate(step, with_cores(cluster), costs).step_s
    cores = cluster.cores
    for _ in range(12):
        cores = math.floor(cores) + max(1, math.floor(cores / 2))
        if simulate(step, with_cores(cluster, cores), costs).step_s <= most * (1 + _LITTLE):
            return cores
    return None

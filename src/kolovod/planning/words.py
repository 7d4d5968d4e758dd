"""A plan for a terminal: a table, a chart of bars, and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from kolovod.observe.units import bytes_text, rate_text, time_text
from kolovod.planning.measured import Measured
from kolovod.planning.plan import Plan, Row

__all__ = ["head", "text"]

_BAR = 40  # characters for an efficiency of 1
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"


def text(plan: Plan) -> str:
    """Return all of it, in lines."""
    lines = [*head(plan), ""]
    for variant in plan.variants:
        rows = [row for row in plan.rows if row.variant == variant.name]
        title = "As it is" if not variant.changes else f"With {variant.name}"
        lines += [f"{title}:", "", *_table(rows), "", *_chart(rows), ""]
    return "\n".join([*lines, *_notes(plan), *plan.advice])


def head(plan: Plan) -> list[str]:
    """Return what was measured, in sentences."""
    seen, cluster, step = plan.measured, plan.measured.cluster, plan.measured.step
    ranks = f"{cluster.ranks} rank{'s' if cluster.ranks > 1 else ''}"
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    lines = [
        f"Measured: {ranks} on {hosts}, {len(seen.steps_s)} steps of {time_text(1e6 * seen.step_s)}"
        f" (the model says {time_text(1e6 * seen.modelled_s)}, {plan.miss:+.0%}).",
        f"A rank alone computes {time_text(1e6 * step.compute_s)} in a step, on {step.cores:.1f} "
        f"cores, and submits {bytes_text(step.bytes)} in {len(step.requests)} buckets.",
        _link_line(plan),
    ]
    return [*lines, _cores_line(seen)]


def _link_line(plan: Plan) -> str:
    link, seen = plan.link, plan.measured
    if plan.is_link_given or seen.knows_link:
        how = "given" if plan.is_link_given else "measured"
        return (
            f"Links between hosts ({how}): {rate_text(link.bytes_per_s)}, a message takes "
            f"{time_text(1e6 * link.latency_s)}."
        )
    return "Links between hosts: none was measured, and none is needed for one host."


def _cores_line(seen: Measured) -> str:
    cluster = seen.cluster
    if not seen.knows_cores:
        return "Cores: the timeline does not say how many; taken to be enough."
    if cluster.hosts_per_machine == 1:
        return f"Cores: {cluster.cores:g} on each host."
    if cluster.hosts_per_machine == cluster.hosts:
        return (
            f"Cores: all hosts share the {cluster.cores:g} of one machine, here and in what "
            "follows; --what-if cores=N gives each host N of its own."
        )
    return f"Cores: every {cluster.hosts_per_machine} hosts share the {cluster.cores:g} of one."


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        f"{'hosts':>6} {'ranks':>6} {'step':>9} {'from':>9} {'to':>9} {'efficiency':>11} "
        f"{'from':>5} {'to':>5}  bottleneck"
    ]
    for row in rows:
        low, high = row.interval
        times = (time_text(1e6 * time_s) for time_s in (row.step_s, row.low_s, row.high_s))
        step, first, last = times
        note = "  extrapolated" if row.beyond else ""
        lines.append(
            f"{row.hosts:>6} {row.ranks:>6} {step:>9} {first:>9} {last:>9} {row.efficiency:>11.1%} "
            f"{low:>5.0%} {min(high, 1.0):>5.0%}  {row.bottleneck}{note}"
        )
    return lines


def _chart(rows: Sequence[Row]) -> list[str]:
    """Return bars of efficiency by hosts, in eighths of a character."""
    lines = []
    for row in rows:
        eighths = round(8 * _BAR * min(1.0, max(0.0, row.efficiency)))
        bar = (_FULL * (eighths // 8) + _EIGHTHS[eighths % 8]).strip().ljust(_BAR)
        note = " extrapolated" if row.beyond else ""
        lines.append(f"{row.hosts:>6} |{bar}| {row.efficiency:.0%}{note}")
    return lines


def _notes(plan: Plan) -> list[str]:
    beyond = sorted({row.beyond for row in plan.rows if row.beyond}, key=len)
    lines = [
        "efficiency: the step of one rank alone over the step here. from, to: where the middle",
        "eight tenths of the steps would be, by their spread in the timeline and by what the model",
        "missed there. bottleneck: without it a step would be shortest.",
    ]
    if beyond:
        lines += [
            f"extrapolated: beyond four times what was measured, up to {beyond[-1]}; a guess."
        ]
    return [*lines, ""]

"""The contents of a report's sections, computed from its figures for the templates. PURE."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from kolovod.observe.summary import RankSummary, Summary, batches, share, straggler
from kolovod.observe.units import bytes_text, time_text
from kolovod.planning import drawing, words
from kolovod.planning.plan import Plan
from kolovod.report import charts
from kolovod.report.anatomy import PARTS, Anatomy
from kolovod.report.figures import Figures
from kolovod.report.lanes import MOST_EVENTS

__all__ = ["LateRow", "RankRow", "sections"]

_MOST_OPERATIONS = 200
_MOST_STRIPS = 32
_MOST_HOSTS = 8  # named among the facts


class RankRow(NamedTuple):
    """The time of one rank; shares of it but for ``hidden``."""

    rank: RankSummary
    parts: Anatomy
    bar: charts.Picture
    waiting: float
    communication: float
    hidden: float
    """The share of communication that is hidden."""


class LateRow(NamedTuple):
    """The time that others waited for one rank."""

    rank: RankSummary
    held_up: float
    """The share of the time."""
    strip: charts.Picture


def sections(figures: Figures) -> dict[str, Any]:
    """Return what the templates need, by the names that they have for it."""
    summary, plan = figures.summary, figures.plan
    return {
        "figures": figures,
        "PARTS": PARTS,
        "MOST_EVENTS": MOST_EVENTS,
        "facts": _facts(figures),
        "rank_rows": _rank_rows(figures),
        "hidden": share(
            sum(rank.hidden_us for rank in summary.ranks),
            sum(rank.communication_us for rank in summary.ranks),
        ),
        "chart": charts.steps(
            figures.slices, "steps" if figures.are_steps else "parts of the time"
        ),
        "straggler": straggler(summary.ranks),
        "late_rows": _late_rows(figures),
        "operations": figures.operations[:_MOST_OPERATIONS],
        "larger_batches": batches(summary.ranks),
        "plan_head": words.head(plan) if plan else [],
        "plan_picture": _picture(plan) if plan else "",
    }


def _facts(figures: Figures) -> Mapping[str, str]:
    summary, ranks = figures.summary, figures.summary.ranks
    times = [rank.step_us for rank in ranks if rank.steps]
    cores = [host.cores for host in figures.hosts]
    machines = {host.machine for host in figures.hosts}
    where = ", ".join(f"{host.host} ({len(host.ranks)})" for host in figures.hosts[:_MOST_HOSTS])
    if (more := len(figures.hosts) - _MOST_HOSTS) > 0:
        where += f" and {more} more"
    return {
        "Ranks": f"{len(ranks)}",
        "Hosts (ranks)": where,
        "Machines": "unknown" if "" in machines else f"{len(machines)}",
        "Cores for a rank": f"{max(cores):g}" if all(cores) else "unknown",
        "Measured steps": _steps_said(summary) if times else "none are marked",
        "Median step": time_text(statistics.median(times)) if times else "unknown",
        "Recorded": time_text(figures.duration_us),
        "Began": _when(figures.recorded_s),
        "Operations of all ranks": f"{summary.operations}",
        "Bytes of these on each rank": bytes_text(summary.bytes),
        "Not recorded": f"{summary.lost} operations" if summary.lost else "nothing",
    }


def _steps_said(summary: Summary) -> str:
    by = f", counted by {summary.counted_by}" if summary.counted_by else ""
    return f"{max(rank.steps for rank in summary.ranks)}{by}"


def _when(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s)) if at_s else "unknown"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _rank_rows(figures: Figures) -> list[RankRow]:
    return [
        RankRow(
            rank=rank,
            parts=parts,
            bar=charts.bar(parts),
            waiting=parts.share("carried", "ranks"),
            communication=share(rank.communication_us, rank.window_us),
            hidden=share(rank.hidden_us, rank.communication_us),
        )
        for rank, parts in zip(figures.summary.ranks, figures.anatomies, strict=True)
    ]


def _late_rows(figures: Figures) -> list[LateRow]:
    """Return those that held up others most, and no more of them than a page takes."""
    shares = [(share(rank.held_up_us, rank.window_us), rank) for rank in figures.summary.ranks]
    shares.sort(key=lambda each: -each[0])
    return [
        LateRow(rank, held_up, charts.strip(rank.rank, figures.slices))
        for held_up, rank in shares[:_MOST_STRIPS]
    ]


def _picture(plan: Plan) -> str:
    """Return the chart of a plan, in base64: an image of its own has a style sheet of its own."""
    return base64.b64encode(drawing.draw(plan).encode("utf-8", "replace")).decode()

"""The sections of a report, as HTML. PURE."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Sequence
from html import escape

from kolovod.observe.summary import Summary, batches, share, straggler
from kolovod.observe.units import bytes_text, rate_text, time_text
from kolovod.planning import drawing, words
from kolovod.planning.plan import Plan
from kolovod.report import charts
from kolovod.report.anatomy import PARTS
from kolovod.report.figures import Figures
from kolovod.report.lanes import MOST_EVENTS
from kolovod.report.markup import Cell, file_text, paragraph, section, sentences, table

__all__ = ["sections"]

_MOST_OPERATIONS = 200
_MOST_STRIPS = 32
_SOFT = "commu\u00adnication"  # may be hyphenated
_MOST_HOSTS = 8  # named among the facts


def sections(figures: Figures) -> str:
    """All of them, in the order of the page."""
    makers = (
        _first, _facts, _anatomy, _lanes, _steps, _stragglers, _links, _operations, _scaling,
    )  # fmt: skip
    return "".join(make(figures) for make in makers)


def _first(figures: Figures) -> str:
    items = []
    for each in figures.advice:
        gain = f' <span class="gain">up to {each.gain:.0%} of a step</span>' if each.gain else ""
        reasons = "".join(paragraph(text) for text in each.reasons)
        items.append(f"<li><h3>{sentences(each.title)}{gain}</h3>{reasons}</li>")
    note = (
        "The most valuable first. Each figure says how much shorter a step (or what a step brings) "
        "could be at most; they do not add up."
    )
    listed = f'<ol class="advice">{"".join(items)}</ol>'
    return section("first", "What to do first", [listed, paragraph(note, "quiet")])


def _steps_said(summary: Summary) -> str:
    by = f", counted by {summary.counted_by}" if summary.counted_by else ""
    return f"{max(rank.steps for rank in summary.ranks)}{by}"


def _facts(figures: Figures) -> str:
    summary, ranks = figures.summary, figures.summary.ranks
    times = [rank.step_us for rank in ranks if rank.steps]
    cores = [host.cores for host in figures.hosts]
    machines = {host.machine for host in figures.hosts}
    where = ", ".join(f"{host.host} ({len(host.ranks)})" for host in figures.hosts[:_MOST_HOSTS])
    if (more := len(figures.hosts) - _MOST_HOSTS) > 0:
        where += f" and {more} more"
    facts = {
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
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    chosen = [paragraph(f"Chosen after {at:.1f} s: {what}.") for at, what in summary.choices]
    return section("facts", "The run", [f'<dl class="facts">{items}</dl>', *chosen])


def _when(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s)) if at_s else "unknown"
    except (OverflowError, ValueError, OSError):
        return "unknown"


def _anatomy(figures: Figures) -> str:
    rows = []
    for rank, parts in zip(figures.summary.ranks, figures.anatomies, strict=True):
        waiting = parts.share("carried", "ranks")
        hidden = share(rank.hidden_us, rank.communication_us)
        communication = share(rank.communication_us, rank.window_us)
        rows.append(
            [
                Cell(f"rank {rank.rank}", rank.rank),
                Cell(rank.host),
                Cell("", None, charts.bar(parts)),
                Cell(time_text(rank.step_us) if rank.steps else "-", rank.step_us),
                Cell(f"{1 - waiting:.1%}", 1 - waiting),
                Cell(f"{waiting:.1%}", waiting),
                *(Cell(f"{parts.share(name):.1%}", parts.share(name)) for name in PARTS),
                Cell(f"{communication:.1%}", communication),
                Cell(f"{hidden:.0%}", hidden),
            ]
        )
    heads = [
        "rank", "host", "parts", "step", "compute", "waiting",
        "marked", "all else", "optimizer step", f"hidden {_SOFT}", "waiting for data",
        "waiting for ranks", _SOFT, "of it hidden",
    ]  # fmt: skip
    note = (
        "Shares of the measured time, which is all but the first two steps; step is the median. "
        "Compute and waiting are as `kolovod timeline` says them: compute is all time in which "
        "the script did not wait for communication. The parts in colour add up to the whole."
    )
    return section(
        "anatomy",
        "What a step is made of",
        [charts.legend(PARTS), table("Time of each rank", heads, rows, sortable=True),
         paragraph(note, "quiet")],
    )  # fmt: skip


def _lanes(figures: Figures) -> str:
    parts = [file_text("lanes.html")]
    if (thinning := figures.thinning) is not None:
        begin, end = (at / 1e6 for at in thinning.whole)
        parts.append(
            paragraph(
                f"Thinned: of {thinning.events} events this page holds {thinning.shown} (it takes "
                f"{MOST_EVENTS} at most): all between {max(0.0, begin):.3f} s and {end:.3f} s, and "
                f"elsewhere those that took longer than {time_text(thinning.least_us)}. The "
                "timeline's file has all of them; Perfetto shows it.",
                "note",
            )
        )
    return section("lanes", "Who did what when", parts)


def _steps(figures: Figures) -> str:
    summary = figures.summary
    communication = sum(rank.communication_us for rank in summary.ranks)
    hidden = sum(rank.hidden_us for rank in summary.ranks)
    said = (
        f"{share(hidden, communication):.0%} of the time in which data were carried was hidden "
        "behind computing (all ranks together)."
    )
    legend = {
        "rest": "computing, nothing is carried",
        **{n: PARTS[n] for n in charts.LAYERS if n != "rest"},
    }
    rows = [
        [
            Cell(_numbers(each.first, each.last), each.first),
            *(Cell(time_text(us), us) for us in (
                each.step_us, each.hidden_us, each.carried_us, each.ranks_us)),
        ]
        for each in figures.slices
    ]  # fmt: skip
    what = "step" if figures.are_steps else "part of the time"
    heads = [what, "took", "hidden communication", "waiting for data", "waiting for ranks"]
    return section(
        "steps",
        "Step by step" if figures.are_steps else "Over time (no steps are marked)",
        [
            paragraph(said),
            charts.legend(legend),
            charts.steps(figures.slices, figures.are_steps),
            f"<details><summary>The figures of this chart</summary>"
            f"{table('Means of all ranks', heads, rows)}</details>",
        ],
    )


def _numbers(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _stragglers(figures: Figures) -> str:
    ranks = figures.summary.ranks
    if len(ranks) < 2:
        said = "One rank: there is nobody to wait for."
        return section("stragglers", "Who was last", [paragraph(said)])
    shares = {rank.rank: share(rank.held_up_us, rank.window_us) for rank in ranks}
    shown = sorted(ranks, key=lambda rank: -shares[rank.rank])[:_MOST_STRIPS]
    rows = [
        [
            Cell(f"rank {rank.rank}", rank.rank),
            Cell(rank.host),
            Cell("", None, charts.strip(rank.rank, figures.slices)),
            Cell(f"{rank.last}", rank.last),
            Cell(f"{shares[rank.rank]:.1%}", shares[rank.rank]),
        ]
        for rank in shown
    ]
    first, last = figures.slices[0].first, figures.slices[-1].last
    what = "steps" if figures.are_steps else "parts"
    heads = ["rank", "host", f"{what} {first} to {last}", "last", "held up"]
    notes = [
        "The stronger the colour, the more of that time others did nothing but wait for this rank. "
        "Last: how often it was the last to submit an operation; held up: the share of the time, "
        "as in `kolovod timeline`."
    ]
    if len(ranks) > len(shown):
        notes.append(f"The {len(shown)} of {len(ranks)} ranks that held up others most.")
    return section(
        "stragglers",
        "Who was last",
        [*map(paragraph, straggler(ranks)),
         table("Ranks that others waited for", heads, rows, sortable=True),
         paragraph(" ".join(notes), "quiet")],
    )  # fmt: skip


def _links(figures: Figures) -> str:
    hosts = [
        [
            Cell(host.host),
            Cell(_listed(host.ranks), host.ranks[0]),
            Cell(host.machine or "unknown"),
            Cell(f"{host.cores:g}" if host.cores else "unknown", host.cores),
        ]
        for host in figures.hosts
    ]
    buckets = [
        [
            Cell(row.size),
            Cell(f"{row.count}", row.count),
            Cell(bytes_text(row.bytes), row.bytes),
            Cell(time_text(row.carried_us), row.carried_us),
            Cell(rate_text(row.bytes_per_s), row.bytes_per_s),
        ]
        for row in figures.buckets
    ]
    heads = ["size", "buckets", "bytes", "median time", "median rate"]
    parts = [*map(paragraph, _of_links(figures))]
    parts.append(table("Hosts", ["host", "ranks", "machine", "cores"], hosts))
    if buckets:
        parts.append(table("How fast buckets were carried", heads, buckets))
        note = (
            "Rate: bytes of tensors over the time from when the last rank began with a bucket "
            "until it had ended on all. What travels between hosts may be more or less."
        )
        parts.append(paragraph(note, "quiet"))
    return section("links", "Hosts and links", parts)


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _of_links(figures: Figures) -> list[str]:
    if len(figures.hosts) < 2:
        return ["All ranks were on one host: no link between hosts was used."]
    seen, told = figures.measured, figures.found.link
    said = []
    if seen is not None and seen.knows_link:
        link = seen.cluster.link
        said.append(
            f"Buckets between hosts reached {rate_text(link.bytes_per_s)} (a quarter of the bytes "
            f"went so fast or faster); a message takes {time_text(1e6 * link.latency_s)}."
        )
        said.append(
            f"Each host sends {bytes_text(figures.sent_bytes)} to others in a step, by the "
            "algorithm that the engine selects for such a link."
        )
    elif told is not None:
        said.append(
            f"At the end the ranks took a link between two hosts to carry {rate_text(told[0])}, "
            f"and a message to take {time_text(1e6 * told[1])}."
        )
    else:
        said.append("The timeline does not say how fast the links between hosts are.")
    said.append("A timeline does not tell pairs of hosts apart: `kolovod doctor -H` measures each.")
    return said


def _operations(figures: Figures) -> str:
    rows = [
        [
            Cell(row.name),
            Cell(row.verb),
            Cell(row.dtype),
            Cell(f"{row.count}", row.count),
            Cell(bytes_text(row.bytes), row.bytes),
            Cell(time_text(row.carried_us), row.carried_us),
            Cell(time_text(row.waited_us), row.waited_us),
            Cell(f"rank {row.last} ({row.last_share:.0%})", row.last_share),
        ]
        for row in figures.operations[:_MOST_OPERATIONS]
    ]
    heads = ["name", "verb", "dtype", "count", "bytes", "carried", "before", "most often last"]
    note = (
        "Carried: in all, in the mean of the ranks; operations of one bucket share its time. "
        "Before: from when a rank had submitted it until it was carried, the mean."
    )
    if (more := len(figures.operations) - len(rows)) > 0:
        note += f" {more} names that took less time are not listed."
    text = "Operations of all ranks, those that took longest first"
    parts = [table(text, heads, rows, sortable=True), paragraph(note, "quiet")]
    return section("operations", "Operations", parts)


def _scaling(figures: Figures) -> str:
    title = "What more hosts would bring"
    larger = [paragraph(text) for text in batches(figures.summary.ranks)]
    plan = figures.plan
    if plan is None:
        why = f"No estimate can be made: {figures.no_plan}."
        return section("scaling", title, [paragraph(why), *larger])
    rows = [
        [
            Cell(f"{row.hosts}", row.hosts),
            Cell(f"{row.ranks}", row.ranks),
            *(Cell(time_text(1e6 * s), s) for s in (row.step_s, row.low_s, row.high_s)),
            Cell(f"{row.efficiency:.1%}", row.efficiency),
            Cell(f"{row.interval[0]:.0%} to {min(row.interval[1], 1.0):.0%}", row.interval[0]),
            Cell(row.bottleneck),
            Cell(f"beyond: {row.beyond}" if row.beyond else ""),
        ]
        for row in plan.rows
    ]
    heads = [
        "hosts", "ranks", "step", "from", "to", "efficiency", "between", "bottleneck",
        "extrapolated",
    ]  # fmt: skip
    note = (
        "By the model of `kolovod plan`. Efficiency: the step of one rank alone over the step "
        "here. From and to: where the middle eight tenths of the steps would be. What is "
        "extrapolated, beyond four times what was measured, is a guess."
    )
    return section(
        "scaling",
        title,
        [
            *map(paragraph, words.head(plan)),
            _picture(plan),
            table("Estimates", heads, rows),
            *map(paragraph, plan.advice),
            *larger,
            paragraph(note, "quiet"),
        ],
    )


def _picture(plan: Plan) -> str:
    """An image of its own, so that its style sheet is not the page's."""
    data = base64.b64encode(drawing.draw(plan).encode("utf-8", "replace")).decode()
    said = ", ".join(f"{row.hosts} hosts {row.efficiency:.0%}" for row in plan.rows)
    return (
        '<div class="scroll picture" role="region" aria-label="Chart of efficiency" tabindex="0">'
        f'<img alt="Efficiency by number of hosts: {escape(said)}" width="640" height="360" '
        f'src="data:image/svg+xml;base64,{data}"></div>'
    )

"""The tables, the goals and the curve of bench/hosts.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import machine
from goals import goals_table
from report import machine_line, number, size_name, summary, table, times

if TYPE_CHECKING:
    from hosts import Record

KIB, MIB = 1 << 10, 1 << 20
SHARE_GOAL = 0.95  # of the bound, at 64 MiB over a limited link
SMALL_GOAL = 2.0  # times gloo at 4 B over a limited link
LARGE_GOAL = 1.2  # times gloo from 1 MiB, where the processor is the limit
PROCESSOR_BITS_PER_S = 5e9  # links faster than that are not the limit here


@dataclass(frozen=True)
class Link:
    """Between every host and the switch."""

    name: str
    bits_per_s: float
    """In each direction; 0: no limit."""
    delay_s: float
    """From host to host, one way."""

    @property
    def is_limit(self) -> bool:
        """Whether the link, not the processor, is what limits a large allreduce."""
        return 0 < self.bits_per_s < PROCESSOR_BITS_PER_S


class Key(NamedTuple):
    """One thing that was measured."""

    hosts: int
    local: int
    link: str
    bytes: int
    peer: str


def bound_s(hosts: int, size: int, bytes_per_s: float) -> float:
    """Return what an allreduce of ``size`` bytes must take at least."""
    return 2 * (hosts - 1) / hosts * size / bytes_per_s


Row = dict[str, Any]
"""hosts, local, link, bytes; microseconds by peer; bound_us."""


def _rows(record: Record) -> list[Row]:
    rows: dict[tuple[int, int, str, int], Row] = {}
    for key, values in record.samples.items():
        rate = max(record.rates[key.hosts, key.link])
        row = rows.setdefault(
            key[:4],
            {
                "hosts": key.hosts,
                "local": key.local,
                "link": key.link,
                "bytes": key.bytes,
                "bound_us": bound_s(key.hosts, key.bytes, rate) * 1e6,
                "us": {},
            },
        )
        row["us"][key.peer] = summary(values)
    return list(rows.values())


def median(row: Row, peer: str) -> float | None:
    """Return microseconds; None if it was not measured."""
    found = row["us"].get(peer)
    return None if found is None else float(found["median"])


def over_gloo(row: Row) -> float | None:
    """Return how many times as fast as gloo."""
    mine, gloo = median(row, "kolovod"), median(row, "gloo")
    return None if mine is None or gloo is None else gloo / mine


def share(row: Row, peer: str) -> float | None:
    """Return the bound over what it took."""
    mine = median(row, peer)
    return None if mine is None else float(row["bound_us"]) / mine


def goal_rows(rows: Sequence[Row], links: Sequence[Link]) -> list[tuple[str, str, str, bool]]:
    """Return goal, what was measured, what is wanted, and whether it is reached."""
    found = []
    for link in links:
        here = [row for row in rows if row["link"] == link.name]
        for hosts, local in dict.fromkeys((row["hosts"], row["local"]) for row in here):
            some = [row for row in here if (row["hosts"], row["local"]) == (hosts, local)]
            found += _goals_of(some, link, f"{link.name}, {hosts} x {local}")
    return found


def _goals_of(rows: Sequence[Row], link: Link, where: str) -> list[tuple[str, str, str, bool]]:
    found = []
    ratios = {row["bytes"]: over_gloo(row) for row in rows}
    known = {size: ratio for size, ratio in ratios.items() if ratio is not None}
    if not link.is_limit:
        known = {size: ratio for size, ratio in known.items() if size >= MIB}
    if known:
        size = min(known, key=known.__getitem__)
        goal = 1.0 if link.is_limit else LARGE_GOAL
        seen = f"{times(known[size])} at {size_name(size)}"
        what = "every size" if link.is_limit else "from 1 MiB"
        found.append((f"{where}: {what}, over gloo", seen, f"{goal:g}x", known[size] >= goal))
    if link.is_limit and 4 in known:
        found.append(
            (
                f"{where}: 4 B, over gloo",
                times(known[4]),
                f"{SMALL_GOAL:g}x",
                known[4] >= SMALL_GOAL,
            )
        )
    large = [row for row in rows if row["bytes"] == 64 * MIB and share(row, "kolovod") is not None]
    if link.is_limit and large:
        reached = share(large[0], "kolovod") or 0.0
        goal_text = f"{SHARE_GOAL:.0%}"
        found.append(
            (f"{where}: 64 MiB, of the bound", f"{reached:.1%}", goal_text, reached >= SHARE_GOAL)
        )
    return found


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _link_table(rows: Sequence[Row]) -> str:
    head = ["hosts x ranks, size", "Kolovod", "gloo", "bound", "over gloo", "of the bound",
            "gloo, of the bound"]  # fmt: skip
    lines = []
    for row in rows:
        large = row["bytes"] >= MIB  # below, latency rules, and the share says nothing
        lines.append(
            [
                f"{row['hosts']} x {row['local']}, {size_name(row['bytes'])}",
                number(median(row, "kolovod")),
                number(median(row, "gloo")),
                number(row["bound_us"]),
                times(over_gloo(row)),
                _percent(share(row, "kolovod")) if large else "-",
                _percent(share(row, "gloo")) if large else "-",
            ]
        )
    return table(head, lines)


def make(record: Record, facts: dict[str, Any], links: Sequence[Link]) -> tuple[Row, str]:
    """Return the JSON and the Markdown of a run."""
    rows = _rows(record)
    command = machine.command_line()
    parts = [
        "# Allreduce between hosts, Kolovod and gloo\n",
        f"`{command}`: {machine_line(facts)}. Hosts are network namespaces of this machine, so all "
        "ranks share its cores. In-place sum of float32; microseconds, medians. How it was "
        "measured: the head of bench/hosts.py. The bound: 2 (H - 1) / H of the bytes at the rate "
        "of plain TCP, measured in the same run.\n",
    ]
    for link in links:
        here = [row for row in rows if row["link"] == link.name]
        if not here:
            continue
        delay = f", {link.delay_s * 1e3:g} ms of delay each way" if link.delay_s else ""
        rates = {
            hosts: max(values) * 8 / 1e6
            for (hosts, name), values in record.rates.items()
            if name == link.name
        }
        seen = ", ".join(f"{hosts} hosts {number(rate)}" for hosts, rate in rates.items())
        parts.append(f"## {link.name}{delay}\n\nPlain TCP, Mbit/s: {seen}.\n")
        parts.append(_link_table(here))
    goals = goal_rows(rows, links)
    if goals:
        parts += ["## Goals\n", goals_table(goals)]
    total, wrong = sum(record.checked.values()), sum(record.wrong.values())
    parts.append(f"Results checked, every element: {total:,}; wrong elements: {wrong:,}.\n")
    loads = [load for one in record.rounds for load in one["loadavg"]]
    if loads:
        parts.append(
            f"Load average of the minute before and after each round: {min(loads):.1f} to "
            f"{max(loads):.1f}, on {facts['cores']} cores. Above about {facts['cores']} others "
            "took part of them, and only ratios mean something.\n"
        )
    parts += [f"Dropped: {who}: {why.splitlines()[-1]}\n" for who, why in record.dropped.items()]
    result = {
        "command": command,
        "machine": facts,
        "rounds": record.rounds,
        "rates": [
            {"hosts": hosts, "link": link, "bytes_per_s": values}
            for (hosts, link), values in record.rates.items()
        ],
        "checked": dict(record.checked),
        "wrong": dict(record.wrong),
        "dropped": {who: why.splitlines()[-1] for who, why in record.dropped.items()},
        "rows": rows,
    }
    return result, "\n".join(part for part in parts if part)


# The curve: a panel for every link and number of hosts, both axes logarithmic.

PANEL = (250, 190)
MARGIN = (62, 40)
GAP = 46
LINES = (("kolovod", "#1764ab", ""), ("gloo", "#d95f02", ""), ("bound", "#777777", "4 3"))


def curve(result: Row, links: Sequence[Link]) -> str:
    """Draw time over size, against the bound, as SVG; one rank per host where there is."""
    local = min((row["local"] for row in result["rows"]), default=1)
    rows = [row for row in result["rows"] if row["local"] == local]
    hosts = sorted({row["hosts"] for row in rows})
    shown = [link for link in links if any(row["link"] == link.name for row in rows)]
    width = MARGIN[0] + len(hosts) * (PANEL[0] + GAP)
    height = MARGIN[1] + len(shown) * (PANEL[1] + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (name, colour, dash) in enumerate(LINES):
        x = MARGIN[0] + index * 110
        parts.append(_line([(x, 16), (x + 24, 16)], colour, dash))
        parts.append(f'<text x="{x + 30}" y="20">{name}</text>')
    for down, link in enumerate(shown):
        decades = _decades([row for row in rows if row["link"] == link.name])
        for right, count in enumerate(hosts):
            some = [row for row in rows if (row["link"], row["hosts"]) == (link.name, count)]
            if some:
                x = MARGIN[0] + right * (PANEL[0] + GAP)
                y = MARGIN[1] + down * (PANEL[1] + GAP)
                title = f"{link.name}, {count} hosts x {local}"
                parts += _panel(some, title, (x, y), decades, labelled=right == 0)
    return "\n".join([*parts, "</svg>\n"])


def _decades(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the powers of ten, in microseconds, that hold what was measured."""
    measured = [us["median"] for row in rows for us in row["us"].values()]
    return math.floor(math.log10(min(measured))), math.ceil(math.log10(max(measured)))


def _line(
    points: Sequence[tuple[float, float]], colour: str, dash: str = "", width: float = 1.6
) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
    )


def _panel(
    rows: Sequence[Row],
    title: str,
    corner: tuple[int, int],
    decades: tuple[int, int],
    *,
    labelled: bool,
) -> list[str]:
    (left, top), (width, height), (low, high) = corner, PANEL, decades
    rows = sorted(rows, key=lambda row: row["bytes"])
    series = {
        "kolovod": [(row["bytes"], median(row, "kolovod")) for row in rows],
        "gloo": [(row["bytes"], median(row, "gloo")) for row in rows],
        "bound": [(row["bytes"], row["bound_us"]) for row in rows],
    }
    first, last = math.log2(rows[0]["bytes"]), math.log2(rows[-1]["bytes"])

    def place(size: float, us: float) -> tuple[float, float]:
        x = (math.log2(size) - first) / max(1.0, last - first)
        y = (math.log10(us) - low) / max(1, high - low)
        return left + x * width, top + height - y * height

    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#bbb"/>',
        f'<text x="{left + 6}" y="{top + 15}" font-weight="bold">{title}</text>',
    ]
    for power in range(low, high + 1):
        y = place(rows[0]["bytes"], 10.0**power)[1]
        parts.append(_line([(left, y), (left + width, y)], "#dddddd", width=0.7))
        if labelled:
            name = f"{10.0**power / 1e6:g} s" if power >= 6 else f"{10**power:,} µs"
            parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        x = place(row["bytes"], 10.0**low)[0]
        parts.append(
            f'<text x="{x:.1f}" y="{top + height + 15}" text-anchor="middle">'
            f"{size_name(row['bytes'])}</text>"
        )
    for name, colour, dash in LINES:
        # The bound of small sizes lies below the picture.
        points = [place(size, us) for size, us in series[name] if us and us >= 10.0**low]
        if points:
            parts.append(_line(points, colour, dash))
    return parts

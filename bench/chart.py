"""The chart in the README: allreduce of Kolovod over its peers, from collectives.json.

``python bench/chart.py`` writes bench/results/allreduce.svg again; the same figures make the same
bytes. Every point is a ratio of two medians of one run, 2 ranks on one host, in one mode of the
machine; a size that the shown mode lacks is taken from another one and drawn hollow. Points below
the line "as fast" are shown like all others. The picture has a ground of its own, light or dark as
the reader's system asks for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import goals
from collectives_report import groups_of, in_some_mode, modes_of_two
from report import RESULTS, machine_line, number, size_name

from kolovod.observe.svg import page, style, text

CHART = RESULTS / "allreduce.svg"
WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 60, 126, 66, 78  # around the field with the curves
DECADES = (-1, 3)  # of the vertical axis: 0.1 to 1000 times as fast
LABEL_STEP = 11

Cell = Mapping[str, Any]


class Curve(NamedTuple):
    """One peer: what it is called, its class in the style, and the ratio in a cell."""

    name: str
    style: str
    ratio: Callable[[Cell], float | None]
    has_figures: bool = True


class Point(NamedTuple):
    """``hollow``: measured in another mode than most."""

    size: int
    value: float
    hollow: bool


def _over(peer: str, ours: str) -> Callable[[Cell], float | None]:
    return lambda cell: goals.ratio(goals.median(cell, peer), goals.median(cell, ours))


def _over_mpi(cell: Cell) -> float | None:
    return goals.ratio(goals.better_mpi(cell), goals.median(cell, "kolovod"))


CURVES = (
    Curve("gloo", "gloo", _over("gloo", "kolovod")),
    Curve("gloo, by TCP", "tcp", _over("gloo", "kolovod-tcp"), has_figures=False),
    Curve("the faster MPI", "mpi", _over_mpi),
)

COLOURS = {"gloo": "blue", "tcp": "violet", "mpi": "orange"}  # by class of a curve


def points(result: Mapping[str, Any]) -> dict[str, list[Point]]:
    """Return the points of each curve, by size."""
    groups = groups_of(result)
    modes = modes_of_two(groups)
    sizes = {
        size for (np, _), cells in groups.items() if np == 2 for what, size in cells
        if what == "allreduce"
    }  # fmt: skip
    found: dict[str, list[Point]] = {curve.name: [] for curve in CURVES}
    for size in sorted(sizes):
        mode, cell = in_some_mode(groups, modes, ("allreduce", size))
        for curve in CURVES:
            value = curve.ratio(cell)
            if value is not None:
                found[curve.name].append(Point(size, value, mode != modes[0]))
    return found


class Field:
    """Where sizes and ratios are in the picture: sizes side by side, ratios by decades."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: those to show, ascending, two at least."""
        self.sizes = sizes

    def x(self, size: int) -> float:
        """Return where a size is, from the left."""
        first, last = LEFT + 24, WIDTH - RIGHT - 24
        return first + (last - first) * self.sizes.index(size) / (len(self.sizes) - 1)

    def y(self, value: float) -> float:
        """Return where a ratio is, from the top; what is beyond the axis is drawn at its end."""
        low, high = DECADES
        share = (min(max(math.log10(value), low), high) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * share


def svg(result: Mapping[str, Any]) -> str:
    """Draw the picture."""
    curves = points(result)
    sizes = sorted({point.size for each in curves.values() for point in each})
    if len(sizes) < 2:
        raise ValueError("allreduce of 2 ranks was measured at less than two sizes")
    field, mode = Field(sizes), modes_of_two(groups_of(result))[0]
    parts = _ground(field)
    for curve in CURVES:
        parts += _curve(curve, curves[curve.name], field)
    parts += _names([(field.y(line[-1].value), curve) for curve in CURVES
                     if (line := curves[curve.name])])  # fmt: skip
    legend = (
        f"Filled: mode {mode}; hollow: a size that was measured in another mode only. "
        "Near: the two cores share a cache; far: they do not."
    )
    source = f"{machine_line(result['machine'])}; bench/results/collectives.md"
    parts.append(text(20, HEIGHT - 32, legend, "quiet", size=11))
    parts.append(text(20, HEIGHT - 14, source, "quiet", size=11))
    return page(WIDTH, HEIGHT, style(COLOURS), parts)


def _ground(field: Field) -> list[str]:
    """Draw everything but the curves."""
    level, bottom = field.y(1), HEIGHT - BOTTOM
    what = "2 processes on one host, sum of float32 in place, from Python; medians of one run"
    title = "Allreduce: how many times as fast as its peers Kolovod is"
    parts = [
        text(20, 28, title, size=17, bold=True),
        text(20, 48, what, "quiet"),
        f'<rect class="shade" x="{LEFT}" y="{level:.1f}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{bottom - level:.1f}"/>',
    ]
    for decade in range(DECADES[0], DECADES[1] + 1):
        value = 10.0**decade
        style, y = "level" if value == 1 else "grid", field.y(value)
        parts.append(
            f'<line class="{style}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(text(LEFT - 8, y + 4, f"{value:g}x", "quiet", "end"))
    parts.append(text(WIDTH - RIGHT - 8, bottom - 8, "slower than the peer", "quiet", "end"))
    for size in field.sizes:
        parts.append(text(field.x(size), bottom + 18, size_name(size), "quiet", "middle", 11))
    return parts


def _curve(curve: Curve, line: Sequence[Point], field: Field) -> list[str]:
    """Draw a curve, its points, and what most of them are in figures."""
    path = " ".join(f"{field.x(point.size):.1f},{field.y(point.value):.1f}" for point in line)
    parts = [f'<polyline class="{curve.style}" points="{path}"/>']
    for point in line:
        x, y, value = field.x(point.size), field.y(point.value), number(point.value)
        style = f"{curve.style} hollow" if point.hollow else curve.style
        parts.append(
            f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{size_name(point.size)}: {value}x over {curve.name}</title></circle>"
        )
        if curve.has_figures:
            y += -8 if point.value >= 1 else 16
            parts.append(text(x, y, value, curve.style, "middle", 10))
    return parts


def _names(ends: list[tuple[float, Curve]]) -> list[str]:
    """Draw the curves' names beside their last points, so far apart that they can be read."""
    parts, last = [], 0.0
    for wanted, curve in sorted(ends, key=lambda end: end[0]):
        last = max(wanted + 4, last + LABEL_STEP + 4)
        parts.append(text(WIDTH - RIGHT + 8, last, f"over {curve.name}", curve.style, size=11))
    return parts


def write(folder: Path = RESULTS, chart: Path = CHART) -> None:
    """Draw the chart from the results in ``folder``."""
    chart.write_text(svg(json.loads((folder / "collectives.json").read_text())))


if __name__ == "__main__":
    write()

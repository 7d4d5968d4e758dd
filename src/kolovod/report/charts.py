"""The charts of a report: coordinates for the templates that draw them in SVG. PURE.

They stretch to the width of the page; text within such a picture would be as small as a phone is
narrow, so words stand beside it. Colours are classes of page.css.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from kolovod.observe.units import time_text
from kolovod.report.anatomy import PARTS, Anatomy, Slice

__all__ = ["HEIGHT", "WIDTH", "Picture", "Shape", "StepsChart", "bar", "steps", "strip"]

WIDTH = 1000
HEIGHT = 200  # of the steps' chart
_TALL = 4.0  # times the median step: taller ones are cut
_LAYERS: dict[str, Callable[[Slice], float]] = {
    "rest": lambda s: s.step_us - s.hidden_us - s.carried_us - s.ranks_us,
    "hidden": lambda s: s.hidden_us,
    "carried": lambda s: s.carried_us,
    "ranks": lambda s: s.ranks_us,
}
"""Of a step, from the bottom."""


class Shape(NamedTuple):
    """A rectangle as high as its picture."""

    colour: str
    x: float
    width: float
    opacity: float = 1.0


class Picture(NamedTuple):
    """Shapes side by side, WIDTH wide."""

    label: str
    shapes: Sequence[Shape]


class StepsChart(NamedTuple):
    """The time of each step, in layers."""

    label: str
    top_us: float
    """The time at the upper end."""
    tallest_us: float
    cut: int
    """The number of columns that are higher than that."""
    outlines: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    """For each layer its colour, and of each column the top and the right end.

    Layers begin at the ground; those behind come first.
    """


def bar(anatomy: Anatomy) -> Picture:
    """Return the parts of a rank's time side by side."""
    shares = {name: anatomy.share(name) for name in PARTS}
    lefts = [0.0, *accumulate(shares.values())]
    shapes = [
        Shape(name, WIDTH * left, WIDTH * share)
        for left, (name, share) in zip(lefts, shares.items(), strict=False)
        if share > 0
    ]
    said = ", ".join(f"{PARTS[name]} {share:.1%}" for name, share in shares.items())
    return Picture(f"rank {anatomy.rank}: {said}", shapes)


def steps(slices: Sequence[Slice], what: str) -> StepsChart:
    """Return the time of each step; ``what``: their word, in the plural."""
    tallest = max(each.step_us for each in slices)
    usual = statistics.median(each.step_us for each in slices)
    top = min(tallest, _TALL * usual) or 1.0
    wide = WIDTH / len(slices)
    heights = [0.0] * len(slices)
    outlines = []
    for name, layer in _LAYERS.items():
        heights = [below + layer(each) for below, each in zip(heights, slices, strict=True)]
        tops = (HEIGHT - min(height / top * HEIGHT, HEIGHT) for height in heights)
        outlines.append((name, [(y, wide * number) for number, y in enumerate(tops, 1)]))
    return StepsChart(
        label=f"{what} {slices[0].first} to {slices[-1].last}: {time_text(usual)} in the median, "
        f"{time_text(tallest)} most",
        top_us=top,
        tallest_us=tallest,
        cut=sum(each.step_us > top for each in slices),
        outlines=outlines[::-1],
    )


def strip(rank: int, slices: Sequence[Slice]) -> Picture:
    """Show when others waited for this rank: the more of a step, the stronger the colour."""
    wide = WIDTH / len(slices)
    shares = [each.held_up.get(rank, 0.0) for each in slices]
    shapes = [
        Shape("ranks", wide * number, wide, min(1.0, 0.15 + 0.85 * share))
        for number, share in enumerate(shares)
        if share > 0.01
    ]
    worst = max(range(len(shares)), key=lambda number: shares[number])
    said = f"most in {slices[worst].first}: {shares[worst]:.0%}" if shares[worst] else "never"
    return Picture(f"rank {rank} held up others {said}", shapes)

"""Charts of a report: shapes in SVG that stretch to the width of the page, words beside them.

Text within such a picture would be as small as a phone is narrow. Colours are classes of page.css.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate

from kolovod.observe.units import time_text
from kolovod.report.anatomy import PARTS, Anatomy, Slice

__all__ = ["LAYERS", "bar", "legend", "steps", "strip"]

_WIDTH = 1000
_TALL = 4.0  # times the median step: taller ones are cut
LAYERS: dict[str, Callable[[Slice], float]] = {
    "rest": lambda s: s.step_us - s.hidden_us - s.carried_us - s.ranks_us,
    "hidden": lambda s: s.hidden_us,
    "carried": lambda s: s.carried_us,
    "ranks": lambda s: s.ranks_us,
}
"""Of a step, from the bottom."""


def _svg(height: int, label: str, shapes: Sequence[str], name: str) -> str:
    return (
        f'<svg class="{name}" viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'
    )


def legend(words: Mapping[str, str]) -> str:
    """``words``: by class of colour."""
    items = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect class="c-{name}" width="10" '
        f'height="10"/></svg>{escape(text)}</li>'
        for name, text in words.items()
    )
    return f'<ul class="legend">{items}</ul>'


def bar(anatomy: Anatomy) -> str:
    """The parts of a rank's time side by side."""
    shares = {name: anatomy.share(name) for name in PARTS}
    lefts = [0.0, *accumulate(shares.values())]
    shapes = [
        f'<rect class="c-{name}" x="{_WIDTH * left:.1f}" width="{_WIDTH * share:.1f}" height="24"/>'
        for left, (name, share) in zip(lefts, shares.items(), strict=False)
        if share > 0
    ]
    said = ", ".join(f"{PARTS[name]} {share:.1%}" for name, share in shares.items())
    return _svg(24, f"rank {anatomy.rank}: {said}", shapes, "bar")


def steps(slices: Sequence[Slice], are_steps: bool) -> str:
    """Draw the time of each step, in layers, with an axis; a figure."""
    tallest = max(each.step_us for each in slices)
    usual = statistics.median(each.step_us for each in slices)
    top = min(tallest, _TALL * usual) or 1.0
    cut = sum(each.step_us > top for each in slices)
    shapes = []
    for name in reversed(LAYERS):  # the upper ones are behind
        heights = [sum(layer(each) for layer in _until(name)) / top * 200 for each in slices]
        shapes.append(f'<path class="c-{name}" d="{_outline(heights)}"/>')
    what = "steps" if are_steps else "parts of the time"
    first, last = slices[0].first, slices[-1].last
    label = f"{what} {first} to {last}: {time_text(usual)} in the median, {time_text(tallest)} most"
    note = ""
    if cut:
        columns = "1 column is" if cut == 1 else f"{cut} columns are"
        note = f" {columns} cut: the tallest is {time_text(tallest)}."
    wide = slices[0].last - slices[0].first + 1
    if wide > 1:
        note += f" Each column is the mean of {wide} {what}."
    one = "step" if are_steps else "part"
    return (
        f'<div class="plot"><div class="y" aria-hidden="true"><span>{time_text(top)}</span>'
        f"<span>{time_text(top / 2)}</span><span>0</span></div>"
        f"{_svg(200, label, shapes, 'steps')}"
        f'<div class="x" aria-hidden="true"><span>{one} {first}</span><span>{one} {last}</span>'
        f"</div></div><p class=quiet>{escape(label.capitalize())}.{note}</p>"
    )


def _until(name: str) -> list[Callable[[Slice], float]]:
    names = list(LAYERS)
    return [LAYERS[each] for each in names[: names.index(name) + 1]]


def _outline(heights: Sequence[float]) -> str:
    """From the ground of 200, columns of these heights, side by side."""
    wide = _WIDTH / len(heights)
    parts = ["M0 200"]
    for number, height in enumerate(heights):
        parts.append(f"V{200 - min(height, 200.0):.1f}H{wide * (number + 1):.1f}")
    return "".join(parts) + "V200Z"


def strip(rank: int, slices: Sequence[Slice]) -> str:
    """When others waited for this rank: the more of a step, the stronger the colour."""
    wide = _WIDTH / len(slices)
    shares = [each.held_up.get(rank, 0.0) for each in slices]
    shapes = [
        f'<rect class="c-ranks" x="{wide * number:.1f}" width="{wide:.1f}" height="20" '
        f'opacity="{min(1.0, 0.15 + 0.85 * share):.2f}"/>'
        for number, share in enumerate(shares)
        if share > 0.01
    ]
    worst = max(range(len(shares)), key=lambda number: shares[number])
    said = f"most in {slices[worst].first}: {shares[worst]:.0%}" if shares[worst] else "never"
    return _svg(20, f"rank {rank} held up others {said}", shapes, "strip")

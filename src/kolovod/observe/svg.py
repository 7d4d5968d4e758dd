"""The parts that all charts in SVG share: text, and a page with its own light or dark ground.

The picture takes the colours that the reader's system asks for (prefers-color-scheme).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["COLOURS", "page", "style", "text"]

COLOURS = {
    "blue": ("#0969da", "#58a6ff"),
    "violet": ("#8250df", "#bc8cff"),
    "orange": ("#bc4c00", "#f0883e"),
}
"""Of curves: on a light and on a dark ground."""

_LIGHT = """
.ground { fill: #ffffff; stroke: #d0d7de; }
text { fill: #1f2328; }
.quiet { fill: #59636e; }
.grid { stroke: #d8dee4; }
.level { stroke: #59636e; stroke-width: 1.5; }
.shade { fill: #f3f4f6; }
polyline { stroke-width: 2; }
.hollow { fill: #ffffff; stroke-width: 2; }
"""
_DARK = """
.ground, .hollow { fill: #0d1117; }
.ground { stroke: #3d444d; }
text { fill: #f0f6fc; }
.quiet { fill: #9198a1; }
.grid { stroke: #2a313c; }
.level { stroke: #9198a1; }
.shade { fill: #161b22; }
"""


def style(curves: dict[str, str]) -> str:
    """Return the style sheet; ``curves``: by class, the colour (of ``COLOURS``)."""
    light, dark = _LIGHT, _DARK
    for name, colour in curves.items():
        on_light, on_dark = COLOURS[colour]
        light += f".{name} {{ stroke: {on_light}; fill: {on_light}; }}\n"
        light += f"polyline.{name} {{ fill: none; }}\ntext.{name} {{ stroke: none; }}\n"
        light += f".{name}.hollow {{ fill: #ffffff; }}\n"
        dark += f".{name} {{ stroke: {on_dark}; }}\n"
        dark += f"circle.{name}:not(.hollow), text.{name} {{ fill: {on_dark}; }}\n"
        dark += f".{name}.hollow {{ fill: #0d1117; }}\n"
    return f"{light}@media (prefers-color-scheme: dark) {{{dark}}}\n"


def page(width: int, height: int, sheet: str, parts: Iterable[str]) -> str:
    """Return a whole picture; ``sheet``: a style sheet."""
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" role="img">\n'
        f"<style>{sheet}</style>\n"
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f"{inner}\n</svg>\n"
    )


def text(
    x: float,
    y: float,
    words: str,
    name: str = "",
    anchor: str = "start",
    size: int = 12,
    bold: bool = False,
) -> str:
    """Return words in the picture; ``name``: their class."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'font-size="{size}"{weight}>{escape(words)}</text>'
    )

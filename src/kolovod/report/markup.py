"""Pieces of HTML: whatever comes from a timeline is escaped here. PURE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

__all__ = ["Cell", "as_json", "file_text", "paragraph", "section", "sentences", "table"]

_NUMBER = ' class="number"'
_CODE = re.compile(r"`([^`]+)`")


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    value: float | None = None
    """The value that it is sorted by; a number stands at the right."""
    markup: str = ""
    """Instead of ``text``: HTML that is safe already."""


def sentences(text: str) -> str:
    """Text of ours, with figures: what stands between backquotes is code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def paragraph(text: str, name: str = "") -> str:
    """``name``: its class."""
    return f'<p class="{name}">{sentences(text)}</p>' if name else f"<p>{sentences(text)}</p>"


def section(number: str, title: str, parts: Iterable[str]) -> str:
    """``number``: its id."""
    inner = "\n".join(parts)
    return (
        f'<section id="{number}" aria-labelledby="{number}-title">\n'
        f'<h2 id="{number}-title">{escape(title)}</h2>\n{inner}\n</section>\n'
    )


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, sortable: bool = False
) -> str:
    """The first cell of a row is its head. It scrolls sideways where it is too wide."""
    name = "sortable" if sortable else "plain"
    numbers = [cell.value is not None for cell in rows[0]] if rows else [False] * len(heads)
    columns = "".join(
        f'<th scope="col"{_NUMBER if is_number and place else ""}>{escape(head)}</th>'
        for place, (head, is_number) in enumerate(zip(heads, numbers, strict=True))
    )
    body = "\n".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table class="{name}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _row(row: Sequence[Cell]) -> str:
    return "".join(
        _cell(cell, 'th scope="row"' if number == 0 else "td") for number, cell in enumerate(row)
    )


def _cell(cell: Cell, opening: str) -> str:
    number = "" if cell.value is None else f'{_NUMBER} data-value="{cell.value:.9g}"'
    inner = cell.markup or escape(cell.text)
    return f"<{opening}{number}>{inner}</{opening.partition(' ')[0]}>"


def as_json(value: Any) -> str:
    """Return JSON for a script element: no text in it can end that, or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def file_text(name: str) -> str:
    """A file beside this one: a template, a style sheet, a script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

"""Figures to text: statistics, Markdown tables, result files, the tables in docs/benchmarks.md.

``python bench/report.py`` writes the summary of bench/results into docs/benchmarks.md again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import machine

RESULTS = machine.BENCH / "results"
PAGE = machine.ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

LINE = 400
"""Characters that a line of a result file may have, so that a record is a line."""

Json = dict[str, Any]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float]) -> Json:
    """Return median, p90 and extremes of a sample that is not empty."""
    return {
        "median": quantile(values, 0.5),
        "p90": quantile(values, 0.9),
        "min": min(values),
        "max": max(values),
        "samples": len(values),
    }


def spans(answers: Sequence[Json], divisor: float) -> list[float]:
    """Return, by iteration, max(end) - min(start) of the ranks that took part, over ``divisor``."""
    starts = [answer["starts"] for answer in answers if answer["starts"]]
    ends = [answer["ends"] for answer in answers if answer["ends"]]
    return [
        (max(end) - min(start)) / divisor
        for start, end in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)
    ]


def number(value: float | None) -> str:
    """Return three digits that matter; ``-`` for what was not measured."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(value: float | None) -> str:
    """Return a ratio, as in 3.5x."""
    return "-" if value is None else f"{number(value)}x"


def size_name(size: int) -> str:
    """Return a size as in 4 B, 64 KiB, 256 MiB."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def in_lines(value: Any, indent: str = "\n") -> str:
    """Return ``value`` as JSON: what fits in a line is one, of all else each item begins one."""
    text = json.dumps(value)
    if len(indent + text) <= LINE or not isinstance(value, dict | list):
        return text
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {in_lines(each, deeper)}" for key, each in value.items()]
    else:
        items = [in_lines(each, deeper) for each in value]
    return text[0] + deeper + f",{deeper}".join(items) + indent + text[-1]


def write(name: str, result: Json, markdown: str, folder: Path) -> None:
    """Write ``name``.json and ``name``.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(in_lines(result) + "\n")
    (folder / f"{name}.md").write_text(markdown)


def between_markers(text: str, inner: str) -> str:
    """Replace what lies between the two markers of ``text``. ValueError without markers."""
    head, found_begin, rest = text.partition(BEGIN)
    _, found_end, tail = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"no place for the figures: {BEGIN} ... {END} is missing")
    return f"{head}{BEGIN}\n{inner.strip()}\n{END}{tail}"


def update_page(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Put the short tables of the latest full runs into docs/benchmarks.md."""
    page.write_text(between_markers(page.read_text(), short_tables(folder)))


def short_tables(folder: Path = RESULTS) -> str:
    """Return what docs/benchmarks.md shows of the runs whose results are in ``folder``."""
    parts = []
    for name in ("collectives", "training"):
        path = folder / f"{name}.json"
        if path.exists():
            parts += [*json.loads(path.read_text())["short"], ""]
    if not parts:
        raise ValueError(f"no results in {folder.name}: run bench/collectives.py first")
    return "\n".join(parts)


def machine_line(facts: Json) -> str:
    """Return one line about the machine."""
    return (
        f"{facts['date'][:10]}, {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, "
        f"Python {facts['python']}"
    )


if __name__ == "__main__":
    update_page()

"""Rows of the GPU check, one JSON object a line, and the page made of them.

bench/results/gpu.jsonl   the latest row of each part on each kind of GPU
bench/results/gpu.md      what they say
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import environments
from gpu_parts import PARTS

ROWS = environments.ROOT / "bench" / "results" / "gpu.jsonl"
PAGE = ROWS.with_suffix(".md")
REHEARSAL = "cpu"  # the device's name in rows of --device cpu


class BadRows(ValueError):
    """A file of rows that cannot be used; the text says which line, and why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one run of one part has come to."""

    part: str
    when: str
    """UTC, as in 2026-11-26 23:30 UTC."""
    commit: str
    """Of the scripts, "unknown" where they were no checkout of git."""
    wheel: str
    """Its file name and the beginning of its SHA-256, or "none" where the package was there."""
    device: str
    """The GPU's name; "cpu" in a rehearsal."""
    versions: dict[str, str]
    ok: bool
    """Whether it came to its end with no problem."""
    seconds: float
    figures: dict[str, Any]
    error: str = ""
    """Its problems, a line each, or the last lines of what it printed if it had no end."""

    def line(self) -> str:
        """Return the row as JSON."""
        return json.dumps(dataclasses.asdict(self))


FIELDS = {field.name for field in dataclasses.fields(Row)}


def read(path: Path) -> list[Row]:
    """Return all rows of a file. Raises BadRows."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise BadRows(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(fields, dict) or set(fields) != FIELDS:
            raise BadRows(f"{path}, line {number}: not a row: expected {sorted(FIELDS)}")
        rows.append(Row(**fields))
    return rows


def results(rows: Iterable[Row], source: Path) -> Iterator[Row]:
    """Return the same rows. Raises BadRows for those that no GPU has made."""
    for row in rows:
        if row.device == REHEARSAL:
            raise BadRows(f"{source}: part {row.part} of {row.when} was rehearsed without a GPU")
        yield row


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return the latest row of each part on each kind of GPU, in the order of parts."""
    latest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row.when):
        latest[row.device, row.part] = row
    order = [*PARTS]

    def place(row: Row) -> tuple[str, int, str]:
        number = order.index(row.part) if row.part in PARTS else len(order)
        return row.device, number, row.part

    return sorted(latest.values(), key=place)


# The page -----------------------------------------------------------------------------------------

HEAD = """# Kolovod on a GPU

Made by `python scripts/gpu_check.py --page` from gpu.jsonl, whose rows `scripts/gpu_check.py` has
written on a machine with a GPU ([how](../../docs/gpu.md#checking-it)).
"""


def page(rows: Sequence[Row]) -> str:
    """Return all rows as Markdown."""
    parts = [HEAD]
    if not rows:
        lines = [environments.line(name, {"it": part.text}, ["it"]) for name, part in PARTS.items()]
        table = "\n".join(["| part | what it looks at |", "|---|---|", *lines])
        parts += ["**No GPU has run this yet**: there are no figures.\n", table + "\n"]
    for device in dict.fromkeys(row.device for row in rows):
        parts.append(of_device(device, [row for row in rows if row.device == device]))
    return "\n".join(parts)


COLUMNS = ("what it looks at", "outcome", "seconds", "commit", "date")


def of_device(device: str, rows: Sequence[Row]) -> str:
    """Return a table of the parts, then what each has found."""
    lines = [f"## {device}\n", versions_of(rows), ""]
    lines += [f"| part | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row in rows:
        part = PARTS.get(row.part)
        cells = {
            "what it looks at": part.text if part else "",
            "outcome": "in order" if row.ok else "**not in order**",
            "seconds": row.seconds,
            "commit": row.commit,
            "date": row.when,
        }
        lines.append(environments.line(row.part, cells, COLUMNS))
    done = {row.part for row in rows}
    if missing := [name for name in PARTS if name not in done]:
        lines += ["", f"Not run on it: {', '.join(missing)}."]
    for row in rows:
        lines += ["", f"### {row.part}\n", *of_row(row)]
    return "\n".join(lines) + "\n"


def versions_of(rows: Sequence[Row]) -> str:
    """Return what the rows ran with, a line for each set of versions and wheel."""
    said = (
        ", ".join(f"{name} {version}" for name, version in row.versions.items())
        + f"; wheel: {row.wheel}."
        for row in rows
    )
    return "\n\n".join(dict.fromkeys(said))


def of_row(row: Row) -> list[str]:
    """Return its problems, then its figures."""
    lines = []
    if row.error:
        lines += ["Problems:\n", "```", row.error.replace("```", "'''"), "```", ""]
    if row.part == "times":
        return lines + of_times(row.figures)
    figures = [
        environments.line(label, {"figure": text}, ["figure"]) for label, text in flat(row.figures)
    ]
    return lines + (["| what | figure |", "|---|---|", *figures] if figures else ["No figures."])


def flat(figures: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Return a tree of figures as labels and texts."""
    for label, value in figures.items():
        name = f"{before}, {label}" if before else str(label)
        if isinstance(value, dict):
            yield from flat(value, name)
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                yield from flat(each, f"{name} {number}")
        else:
            yield name, " ".join(str(value).split())


def of_times(figures: Mapping[str, Any]) -> list[str]:
    """Return steps with what Kolovod costs, then verbs, then memory."""
    steps = ["| ranks | net | plain, ms | Kolovod, ms | cost | DDP over gloo, ms |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    verbs = ["| ranks | size | host memory, ms | GPU, ms |", "|---|---|---|---|"]
    memory = []
    for label, found in figures.items():
        for net, times in found["steps_ms"].items():
            plain, ours = times["plain"], times["kolovod"]
            cells = [label, net, plain, ours, f"{(ours / plain - 1) * 100:+.1f} %"]
            steps.append(f"| {' | '.join(map(str, [*cells, times.get('ddp', '-')]))} |")
        for size, times in found["allreduce_ms"].items():
            cells = [label, size, times["cpu"], times.get("cuda", "-")]
            verbs.append(f"| {' | '.join(map(str, cells))} |")
        if "peak_gb" in found:
            peak, pinned = found["peak_gb"], found["pinned_gb"]
            memory.append(f"{label}: {peak} GB of the GPU at most, {pinned} GB pinned.\n")
    head = ["A training step, medians of the slower rank.\n", *steps, ""]
    return [*head, "A blocking allreduce of float32 in place.\n", *verbs, "", *memory]

"""A chart of the loss in the terminal: over a run whose ranks come and go, beside another run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

HEIGHT = 12
OURS, OTHERS, BOTH = "o", ".", "8"


def draw(
    losses: Sequence[float], sizes: Sequence[int], others: Sequence[float], width: int = 72
) -> str:
    """Lines of text: ``losses`` by step with ``o``, ``others`` with ``.``, the number of ranks.

    The vertical axis is logarithmic. A column is the mean of its steps; its number of ranks is that
    of the last one. Below, ``x`` where ranks have ended, ``+`` where some have come. No steps: "".
    """
    columns = min(width, len(losses))
    if not columns:
        return ""
    ours, theirs = (_means(values, columns) for values in (losses, others))
    logs = [math.log(max(value, 1e-9)) for value in (*ours, *theirs)]
    low, high = min(logs), max(max(logs), min(logs) + 1e-9)

    def row_of(value: float) -> int:
        share = (math.log(max(value, 1e-9)) - low) / (high - low)
        return round((1 - share) * (HEIGHT - 1))

    grid = [[" "] * columns for _ in range(HEIGHT)]
    for column, value in enumerate(theirs):
        grid[row_of(value)][column] = OTHERS
    for column, value in enumerate(ours):
        row = row_of(value)
        grid[row][column] = BOTH if grid[row][column] == OTHERS else OURS
    lines = []
    for number, cells in enumerate(grid):
        level = math.exp(high - (high - low) * number / (HEIGHT - 1))
        lines.append(f"{level:7.3f} |{''.join(cells)}")
    ends = [len(sizes) * (i + 1) // columns for i in range(columns)]
    marks = "".join(_mark(sizes[max(0, a - 1) : b]) for a, b in zip([0, *ends], ends, strict=False))
    digits = "".join(str(sizes[end - 1]) if sizes[end - 1] < 10 else "#" for end in ends)
    last = str(len(losses))
    lines.append(f"   step +{'-' * columns}")
    lines.append(f"         0{last:>{max(1, columns - 1)}}")
    lines.append(f"  ranks  {digits}")
    lines.append(f"         {marks}".rstrip())
    return "\n".join(lines)


def _mark(sizes: Sequence[int]) -> str:
    pairs = list(pairwise(sizes))
    if any(after < before for before, after in pairs):
        return "x"
    return "+" if any(after > before for before, after in pairs) else " "


def _means(values: Sequence[float], count: int) -> list[float]:
    ends = [len(values) * (i + 1) // count for i in range(count)] if values else []
    parts = [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [sum(part) / len(part) for part in parts if part]

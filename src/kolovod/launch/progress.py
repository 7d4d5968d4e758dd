"""The progress of a job: for a callback of ``kolovod.run``, and as a line in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Progress", "notebook_line"]

_MAX_LINE_CHARS = 100


@dataclass(frozen=True)
class Progress:
    """A job as it stands."""

    size: int
    """How many ranks it has."""
    running: tuple[int, ...]
    """The ranks that have not ended."""
    succeeded: tuple[int, ...]
    """The ranks that have ended with exit code 0."""
    elapsed_s: float
    """The time since the ranks were started."""
    last_lines: Mapping[int, str]
    """The last line that each rank has printed to its standard output, if it has printed any."""

    def __str__(self) -> str:
        """Return one line, with what the lowest running rank has printed last."""
        if self.running:
            rank = self.running[0]
            text = f"{len(self.running)} of {self.size} ranks running, {self.elapsed_s:.0f} s"
            line = self.last_lines.get(rank, "")
            return f"{text}; rank {rank}: {line[:_MAX_LINE_CHARS]}" if line else text
        after = f"after {self.elapsed_s:.1f} s"
        if len(self.succeeded) == self.size:
            return f"{self.size} ranks succeeded {after}"
        others = sorted(set(range(self.size)).difference(self.succeeded))
        return f"ended {after}; without success: rank {', '.join(map(str, others))}"


def notebook_line() -> Callable[[Progress], None] | None:
    """Return a function that shows a line in a notebook's cell, and keeps it up to date.

    None: this is no notebook. IPython is not imported: where a cell runs it is there.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:  # a terminal, which has no lines to go back to
        return None
    shown: list[Any] = []

    def show(progress: Progress) -> None:
        content = {"text/plain": f"kolovod.run: {progress}"}
        if shown:
            shown[0].update(content, raw=True)
        else:
            display = sys.modules["IPython.display"].display
            shown.append(display(content, raw=True, display_id=True))

    return show

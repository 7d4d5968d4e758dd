"""What Kolovod says on standard error."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

__all__ = ["report_to", "report_to_stderr"]


def report_to_stderr(text: str) -> None:
    """Print ``text`` marked as Kolovod's; a closed or broken standard error is no failure."""
    report_to(sys.stderr, text)


def report_to(console: TextIO | None, text: str) -> None:
    """The same to another stream."""
    if console is None:  # it was closed before this process began
        return
    with contextlib.suppress(OSError, ValueError):
        console.write(f"kolovod: {text}\n")  # at once: others write, too
        console.flush()

"""Lines that Kolovod writes on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from typing import TextIO

__all__ = ["kept", "report_to", "report_to_stderr"]

kept: deque[str] = deque(maxlen=4)
"""The last findings of what is wrong with this process's training, for ``kolovod top``."""


def report_to_stderr(text: str) -> None:
    """Print ``text`` marked as Kolovod's; a closed or broken standard error is no failure."""
    report_to(sys.stderr, text)


def report_to(console: TextIO | None, text: str) -> None:
    """Print ``text`` to a stream as ``report_to_stderr`` does."""
    if console is None:  # it was closed before this process began
        return
    with contextlib.suppress(OSError, ValueError):
        console.write(f"kolovod: {text}\n")  # at once: others write, too
        console.flush()

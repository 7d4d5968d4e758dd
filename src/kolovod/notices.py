"""What Kolovod says on standard error."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["report_to_stderr"]


def report_to_stderr(text: str) -> None:
    """Print ``text`` marked as Kolovod's; a closed or broken standard error is no failure."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # None: it was closed before
        sys.stderr.write(f"kolovod: {text}\n")  # at once: others write, too
        sys.stderr.flush()

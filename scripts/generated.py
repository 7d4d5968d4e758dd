"""Pages of the documentation that scripts make: written anew, or checked."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["bring_up_to_date"]


def bring_up_to_date(page: Path, wanted: str, script: str) -> int:
    """Write ``wanted``; with --check on the command line return 1 if it is not there yet."""
    if page.exists() and page.read_text(encoding="utf-8") == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{page} is out of date: run python scripts/{script}", file=sys.stderr)
        return 1
    page.write_text(wanted, encoding="utf-8")
    return 0

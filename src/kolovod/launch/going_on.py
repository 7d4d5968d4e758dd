"""The next launcher of a job: ``python -m kolovod.launch.going_on run ... FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kolovod.launch.cli import main as run

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """The job's command line, and the folder that ``job_folders`` has made for it."""
    *given, folder = arguments
    return run(given, goes_on=Path(folder))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The next launcher of a job: ``python -m kolovod.launch.resume run ... JOB``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kolovod.launch.cli import main as run

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the job of this command line; last comes what ``job_folders.take_over`` needs."""
    *given, job = arguments
    return run(given, goes_on=job)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

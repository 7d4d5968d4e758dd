"""``kolovod timeline``: a timeline in a few lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from kolovod.observe import summary

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "Summarise a file that `kolovod run --timeline FILE` has written: the shares "
        "of compute and communication, the straggler, and whether batches are too small. Perfetto "
        "shows the file itself."
    )
    parser.set_defaults(act=_summarize)
    parser.add_argument("file", type=Path, metavar="FILE")


def _summarize(options: argparse.Namespace) -> int:
    print(summary.text(summary.summarize(summary.read(options.file))))
    return 0

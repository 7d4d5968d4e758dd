"""``kolovod attach``: an elastic job is shown again."""

from __future__ import annotations

import argparse

from kolovod.launch.streams import go_on_without_reader
from kolovod.launch.viewer import attach

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "An elastic job goes on if `kolovod run` ends, by a lost connection or a "
        "signal that cannot be passed on. This shows what the job has written since, and what it "
        "writes from now on, passes signals on to it, and exits with its code."
    )
    parser.set_defaults(act=_attach)
    text = "its number; needed where there are several"
    parser.add_argument("job", nargs="?", metavar="JOB", help=text)


def _attach(options: argparse.Namespace) -> int:
    go_on_without_reader()
    return attach(options.job)

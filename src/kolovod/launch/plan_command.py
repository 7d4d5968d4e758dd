"""``kolovod plan``: from a timeline to predictions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kolovod.errors import CommandArgumentError
from kolovod.observe.reading import read
from kolovod.planning import drawing, words
from kolovod.planning.asked import asked
from kolovod.planning.measured import measured

__all__ = ["add", "add_flags"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "From a file that `kolovod run --timeline FILE` has written in a short run: "
        "the time of a step and the efficiency on other numbers of hosts, with an interval; what "
        "holds it up, and what would help. Beyond four times what was measured it says so."
    )
    parser.set_defaults(act=_plan)
    parser.add_argument("file", type=Path, metavar="FILE")
    add_flags(parser)
    parser.add_argument(
        "--what-if",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also with this: compression=int8, bucket=4MiB, batch=2 (times as large), ranks=4 or "
        "cores=8 (of each host); several are taken together",
    )
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw it, too")


def add_flags(parser: Any) -> None:
    """Add ``--hosts`` and ``--link`` to the parser of a command."""
    parser.add_argument(
        "--hosts", metavar="2,8,64", help="numbers of hosts [1, 2, 4 and 8 times the measured one]"
    )
    parser.add_argument(
        "--link",
        metavar="10G[+20ms]",
        help="bits per second from a host to the others, and the delay of a message [as measured]",
    )


def _plan(options: argparse.Namespace) -> int:
    wanted = asked(options.hosts, options.link, options.changes)
    made = wanted.plan(options.file, measured(read(options.file)))
    print(words.text(made))
    if options.chart:
        try:
            options.chart.write_text(drawing.draw(made), encoding="utf-8")
        except OSError as error:
            raise CommandArgumentError(
                f"--chart {str(options.chart)!r} cannot be written: {error.strerror}"
            ) from None
    return 0

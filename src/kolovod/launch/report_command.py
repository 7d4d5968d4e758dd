"""``kolovod report``: a timeline as one HTML page, to send to a colleague."""

from __future__ import annotations

import argparse
from pathlib import Path

from kolovod.errors import CommandArgumentError
from kolovod.launch.plan_command import add_flags
from kolovod.observe.reading import read
from kolovod.observe.units import bytes_text
from kolovod.planning.asked import asked

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "From a file that `kolovod run --timeline FILE` has written: one page that "
        "holds all it needs, with what to do first, the parts of a step, lanes of each rank that "
        "zoom, who was last, links, operations, and what more hosts would bring by the model of "
        "`kolovod plan`. It can be sent to others: it loads nothing from elsewhere."
    )
    parser.set_defaults(act=_report)
    parser.add_argument("file", type=Path, metavar="TIMELINE")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.html", help="[the timeline's, with .html]"
    )
    add_flags(parser)


def _report(options: argparse.Namespace) -> int:
    from kolovod.report.figures import figures  # not for other commands: they start faster
    from kolovod.report.page import page

    wanted = asked(options.hosts, options.link)
    output: Path = options.output or options.file.with_suffix(".html")
    if output.resolve() == options.file.resolve():
        raise CommandArgumentError(f"-o {str(output)!r} is the timeline itself: name another file")
    found = figures(options.file.name, read(options.file), wanted)
    made = page(found)
    try:
        output.write_bytes(made)
    except OSError as error:
        raise CommandArgumentError(
            f"-o {str(output)!r} cannot be written: {error.strerror}"
        ) from None
    print(found.verdict)
    print(f"First: {found.advice[0].title}.")
    print(f"{output}: {bytes_text(len(made))}, open it in a browser")
    return 0

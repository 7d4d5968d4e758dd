"""``kolovod plan``: from a timeline to predictions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kolovod.errors import InvalidArgumentError
from kolovod.launch.foreground import show_all_characters
from kolovod.observe.reading import read
from kolovod.planning import drawing, plan, words
from kolovod.planning.changes import parse_change, parse_hosts, parse_link
from kolovod.planning.measured import measured

__all__ = ["add"]


def add(actions: Any) -> None:
    """The action, to the command's parser."""
    planning = actions.add_parser(
        "plan",
        help="say what a training would take on other hosts, links and codecs, from a timeline",
        description="From a file that `kolovod run --timeline FILE` has written in a short run: "
        "the time of a step and the efficiency on other numbers of hosts, with an interval; what "
        "holds it up, and what would help. Beyond four times what was measured it says so.",
        allow_abbrev=False,
    )
    planning.set_defaults(parser=planning, act=_plan)
    planning.add_argument("file", type=Path, metavar="FILE")
    planning.add_argument(
        "--hosts", metavar="2,8,64", help="numbers of hosts [1, 2, 4 and 8 times the measured one]"
    )
    planning.add_argument(
        "--link",
        metavar="10G[+20ms]",
        help="bits per second from a host to the others, and the delay of a message [as measured]",
    )
    planning.add_argument(
        "--what-if",
        dest="changes",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="also with this: compression=int8, bucket=4MiB, batch=2 (times as large), ranks=4 or "
        "cores=8 (of each host); several are taken together",
    )
    planning.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw it, too")


def _plan(options: argparse.Namespace) -> int:
    changes = [parse_change(text) for text in options.changes]
    keys = [change.key for change in changes]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise InvalidArgumentError(f"--what-if {twice[0]}= is given twice: run it once for each")
    hosts = parse_hosts(options.hosts) if options.hosts else []
    link = parse_link(options.link, 0.0) if options.link else None
    seen = measured(read(options.file))
    hosts = hosts or [times * seen.cluster.hosts for times in (1, 2, 4, 8)]
    if options.link:
        link = parse_link(options.link, seen.cluster.link.latency_s)
    elif not seen.knows_link and max(hosts) > 1:
        raise InvalidArgumentError(
            f"{options.file} is of one host, so no link was measured: say --link 10G (bits per "
            "second), or record a run on two hosts"
        )
    made = plan.make(seen, hosts, link=link, changes=changes)
    show_all_characters()
    print(words.text(made))
    if options.chart:
        try:
            options.chart.write_text(drawing.draw(made), encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(
                f"--chart {str(options.chart)!r} cannot be written: {error.strerror}"
            ) from None
    return 0

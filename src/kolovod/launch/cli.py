"""The ``kolovod`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from kolovod.errors import InvalidArgumentError
from kolovod.launch import wrong_words
from kolovod.launch.streams import as_command
from kolovod.version import __version__

__all__ = ["command", "main"]

_COMMANDS = {
    "run": "start a command several times, as the ranks of one world",
    "check": "run a training script for a few steps, and say whether ranks train together",
    "init": "show the diff that makes a script distributed",
    "ps": "list the jobs that run on this host",
    "stacks": "print where the ranks of a job on this host are",
    "top": "watch a job on this host: steps per second, who waits for whom, links, warnings",
    "attach": "show an elastic job whose launcher has ended",
    "timeline": "say where the time went, from a timeline's file",
    "report": "make one HTML page of a timeline: where the time went, and what to do first",
    "plan": "say what a training would take on other hosts, links and codecs, from a timeline",
    "doctor": "check this host, or those of -H, for what keeps jobs from running well",
    "manifest": "write what Kubernetes needs to start a job",
    "explain": "say what causes an error, and what to do, by the code that its traceback ends with",
}
"""What each does. ``kolovod run`` is in ``run_command``, and so on."""


def command() -> int:
    """The console script: ``main`` with standard streams that may be missing, or fail."""
    return as_command(main)


def main(arguments: Sequence[str] | None = None, goes_on: str | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); return the exit code.

    ``goes_on``: the elastic job that an earlier launcher has begun with it (what
    ``job_folders.take_over`` needs). The code is that of the first rank that failed (128 + N for
    signal N), 0 if none did. Raises SystemExit(2) for a wrong command line, as argparse does.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser(given)
    if wrong := wrong_words.about_command(given, _COMMANDS):
        parser.error(wrong)
    options, unknown = parser.parse_known_args(
        given, argparse.Namespace(given=given, goes_on=goes_on)
    )
    if unknown:
        options.parser.error(wrong_words.about_flags(unknown, options.parser))
    if options.action is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        action: Callable[[argparse.Namespace], int] = options.act
        return action(options)
    except InvalidArgumentError as error:
        options.parser.error(str(error))
        raise  # not reached: error() exits


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """Load the command that is ``given``, and no other: they would take most of its start."""
    parser = argparse.ArgumentParser(
        prog="kolovod",
        description="Data-parallel training: processes that keep their copies of a model equal.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kolovod {__version__}")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    chosen = next((word for word in given if not word.startswith("-")), "")
    for name, text in _COMMANDS.items():
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        if name == chosen:
            import_module(f"kolovod.launch.{name}_command").add(action)
            action.set_defaults(parser=action)
    return parser

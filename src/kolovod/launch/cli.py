"""The ``kolovod`` command."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kolovod import __version__
from kolovod.affinity import check_affinity
from kolovod.config import KNOBS, Knob, load
from kolovod.errors import InvalidArgumentError
from kolovod.launch.mpirun import run_by_mpi
from kolovod.launch.spawn import Job, JobOptions, report_to_stderr
from kolovod.observe import summary

__all__ = ["main"]

_MAX_RANKS = 1024  # of one host, as in csrc/collectives/reduce.h
_EXIT_NOT_FOUND = 127
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); returns the exit code.

    That of the first rank that failed (128 + N for signal N), 0 if none did. Raises SystemExit(2)
    for a wrong command line, as argparse does.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.action is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        action: Callable[[argparse.Namespace], int] = options.act
        return action(options)
    except InvalidArgumentError as error:
        options.parser.error(str(error))
        raise  # not reached: error() exits
    except KeyboardInterrupt:  # before there was a job to pass it on to
        return 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kolovod",
        description="Data-parallel training: processes that keep their copies of a model equal.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kolovod {__version__}")
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    run = actions.add_parser(
        "run",
        help="start a command several times on this host, as the ranks of one world",
        description="Start COMMAND N times on this host, as ranks 0 to N-1 of one world. Exits "
        "with the code of the first rank that fails, after ending the others.",
        usage="kolovod run -np N [options] [--] COMMAND ...",
        allow_abbrev=False,
    )
    run.set_defaults(parser=run, act=_run)
    run.add_argument("-np", "--num-proc", type=_rank_count, required=True, metavar="N")
    run.add_argument(
        "--timestamps", action="store_true", help="put the time before each line of output"
    )
    run.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and stderr",
    )
    run.add_argument(
        "--keep-going",
        action="store_true",
        help="let the other ranks go on when one ends: they can form a smaller world",
    )
    run.add_argument(
        "--label-hosts",
        type=_host_labels,
        default=[],
        metavar="A:2,B:2",
        help="label the ranks as those of several hosts: 2 of A, then 2 of B. They all run here, "
        "but those of different hosts communicate over TCP; to try that on one machine",
    )
    run.add_argument(
        "--mpi-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="with --backend mpi: further arguments of mpirun, as one text",
    )
    run.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; they inherit all others",
    )
    knobs = run.add_argument_group(
        "knobs (also by environment variable; see docs/configuration.md)"
    )
    for knob in KNOBS:
        knobs.add_argument(
            knob.flag,
            dest=f"knob_{knob.name}",
            metavar=(knob.unit or "value").upper(),
            help=f"{knob.text} [{knob.default}]".replace("%", "%%"),
        )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    _add_timeline(actions)
    return parser


def _add_timeline(actions: Any) -> None:
    timeline = actions.add_parser(
        "timeline",
        help="say where the time went, from a timeline's file",
        description="Summarise a file that `kolovod run --timeline FILE` has written: the shares "
        "of compute and communication, the straggler, and whether batches are too small. Perfetto "
        "shows the file itself.",
        allow_abbrev=False,
    )
    timeline.set_defaults(parser=timeline, act=_summarize)
    timeline.add_argument("file", type=Path, metavar="FILE")


def _summarize(options: argparse.Namespace) -> int:
    print(summary.text(summary.summarize(summary.read(options.file))))
    return 0


def _rank_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 to {_MAX_RANKS}")
    return int(text)


def _host_labels(text: str) -> list[str]:
    """The host of each rank, from HOST:SLOTS,HOST:SLOTS,..."""
    labels: list[str] = []
    for part in text.split(","):
        host, _, slots = part.partition(":")
        if not host or not slots.isdecimal() or not 1 <= int(slots) <= _MAX_RANKS:
            raise argparse.ArgumentTypeError(f"{text!r}: expected HOST:SLOTS,HOST:SLOTS,...")
        labels += [host] * int(slots)
    return labels


def _run(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        options.parser.error("no COMMAND to run, for example: kolovod run -np 2 python train.py")
    variables = _variables(options)
    if options.label_hosts and len(options.label_hosts) != options.num_proc:
        raise InvalidArgumentError(
            f"--label-hosts names {len(options.label_hosts)} slots for {options.num_proc} ranks: "
            "give as many"
        )
    settings = load({**os.environ, **variables})
    hosts = options.label_hosts or ["localhost"] * options.num_proc
    check_affinity(settings.thread_affinity, hosts)
    if shutil.which(command[0]) is None:
        report_to_stderr(f"command not found: {command[0]}")
        return _EXIT_NOT_FOUND
    if settings.backend == "mpi":
        _refuse_beside_mpi(options)
        return run_by_mpi(options.num_proc, command, variables, options.mpi_args)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # ranks may print what this terminal's encoding lacks
            reconfigure(errors="replace")
    job_options = JobOptions(
        environment=variables,
        timestamps=options.timestamps,
        output_dir=options.output_dir,
        keep_going=options.keep_going,
        hosts=options.label_hosts,
        stdout=sys.stdout,
        stderr=sys.stderr,
        report=report_to_stderr,
    )
    with Job(options.num_proc, job_options) as job, _forwarding(job):
        job.start(lambda rank: command)
        outcome = job.wait()
    return outcome.exit_code(options.keep_going)


def _refuse_beside_mpi(options: argparse.Namespace) -> None:
    for name in ("timestamps", "output_dir", "keep_going", "label_hosts"):
        if getattr(options, name):
            raise InvalidArgumentError(
                f"--{name.replace('_', '-')} with backend mpi: mpirun starts the ranks and passes "
                "on their output; give it arguments of its own with --mpi-args"
            )


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """What ``-x`` and the knobs' flags set in the ranks' environment."""
    variables = {}
    for text in options.variables:
        name, equals, value = text.partition("=")
        if not name or not equals:
            options.parser.error(f"-x {text!r}: expected NAME=VALUE")
        variables[name] = value
    for knob in KNOBS:
        value = getattr(options, f"knob_{knob.name}")
        if value is not None:
            variables[knob.environment] = _checked(knob, value)
    return variables


def _checked(knob: Knob, text: str) -> str:
    knob.parse(text, knob.flag)
    return text


@contextlib.contextmanager
def _forwarding(job: Job) -> Iterator[None]:
    """Signals to the launcher are signals to the job."""
    before = {
        signum: signal.signal(signum, lambda number, _: job.signal(number)) for signum in _FORWARDED
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

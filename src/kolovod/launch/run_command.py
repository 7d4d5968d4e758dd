"""``kolovod run``: a command several times, as the ranks of one world."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from kolovod.config import KNOBS, Knob, Settings, load
from kolovod.core.affinity import check_affinity
from kolovod.errors import (
    BootstrapError,
    CommandArgumentError,
    text_with_code,
)
from kolovod.launch import elastic_flags, host_flags
from kolovod.launch.elastic_flags import rank_count
from kolovod.launch.foreground import forwarding
from kolovod.launch.hosts import assign, is_this_host
from kolovod.launch.job import Job, JobOptions, Outcome
from kolovod.launch.mpirun import run_by_mpi
from kolovod.launch.other_python import advice, not_found
from kolovod.launch.status import status_of
from kolovod.launch.streams import go_on_without_reader
from kolovod.net.encryption import require_libcrypto
from kolovod.notices import report_to, report_to_stderr

__all__ = ["add"]

_EXIT_NOT_FOUND = 127
_NEVER_HERE = ("KOLOVOD_SECRET", "_HOROVOD_SECRET_KEY")
_LAST_LINES = 12  # of a failed rank's stderr


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.usage = "kolovod run [-np N] [-H HOST:SLOTS,...] [options] [--] COMMAND ..."
    parser.description = (
        "Start COMMAND N times, on this host or on those of -H, as ranks 0 to N-1 of one world. "
        "Exits with the code of the first rank that fails, after ending the others."
    )
    parser.set_defaults(act=_run)
    parser.add_argument(
        "-np", "--num-proc", type=rank_count, metavar="N", help="ranks [all slots of the hosts]"
    )
    host_flags.add(parser)
    elastic_flags.add(parser)
    parser.add_argument(
        "--timestamps", action="store_true", help="put the time before each line of output"
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and stderr",
    )
    parser.add_argument(
        "--merge-output",
        action="store_true",
        help="show a line once that several ranks write within half a second: [0-3]<stdout>:line",
    )
    said = parser.add_mutually_exclusive_group()
    said.add_argument(
        "--progress",
        default="auto",
        metavar="HOW",
        help="how the job gets on: auto (a line at the foot of a terminal; elsewhere one after a "
        "minute, then each ten minutes), plain (a line a minute), plain=SECONDS, off [auto]",
    )
    said.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="say nothing but errors; what ranks write is passed on all the same",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="let the other ranks go on when one ends: they can form a smaller world",
    )
    parser.add_argument(
        "--mpi-variables",
        action="store_true",
        help="also set OMPI_COMM_WORLD_RANK, _SIZE and the like, for programs that read those",
    )
    parser.add_argument(
        "--label-hosts",
        default="",
        metavar="A:2,B:2",
        help="label the ranks as those of several hosts: 2 of A, then 2 of B. They all run here, "
        "but those of different hosts communicate over TCP; to try that on one machine",
    )
    parser.add_argument(
        "--mpi-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help="with --backend mpi: further arguments of mpirun, as one text",
    )
    parser.add_argument(
        "-x",
        "--env",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; they inherit all others, on other hosts but those "
        "that describe a login",
    )
    knobs = parser.add_argument_group(
        "knobs (also by environment variable; see docs/configuration.md)"
    )
    for knob in filter(_has_flag, KNOBS):
        dest, text = f"knob_{knob.name}", knob.text.replace("%", "%%")
        if knob.switch:
            knobs.add_argument(knob.flag, dest=dest, action="store_const", const="1", help=text)
            continue
        metavar = (knob.unit or "value").upper()
        knobs.add_argument(knob.flag, dest=dest, metavar=metavar, help=f"{text} [{knob.default}]")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")


def _run(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        options.parser.error("no COMMAND to run, for example: kolovod run -np 2 python train.py")
    variables = _variables(options)
    places, ssh = host_flags.places(options)
    hosts = assign(places, options.num_proc) if places else []
    settings = load({**os.environ, **variables})
    check_affinity(settings.thread_affinity, hosts)
    here = ssh is None or any(is_this_host(host) for host in dict.fromkeys(hosts))
    if here and (problem := not_found(command)):
        report_to_stderr(problem)
        return _EXIT_NOT_FOUND
    if settings.backend == "mpi":
        _refuse_beside_mpi(options, settings)
        return run_by_mpi(len(hosts), command, variables, options.mpi_args)
    go_on_without_reader()
    how = "off" if options.quiet else options.progress
    status = status_of(how, sys.stdout, sys.stderr, os.environ)
    job_options = JobOptions(
        environment=variables,
        timestamps=options.timestamps,
        output_dir=options.output_dir,
        mpi_variables=options.mpi_variables,
        keep_going=options.keep_going,
        hosts=hosts,
        ssh=ssh,
        merge_output=options.merge_output,
        stdout=status.stdout,
        stderr=status.stderr,
        report=lambda text: report_to(status.stderr, text),
        quiet=options.quiet,
        has_input=True,
    )
    if elastic_flags.is_elastic(options):
        return elastic_flags.run(options, command, places, job_options, status)
    with status, Job(len(hosts), job_options) as job, forwarding(job):
        try:
            if settings.encrypt:  # the rendezvous server is here
                require_libcrypto(socket.gethostname())
            job.start(lambda rank: command)
        except BootstrapError as error:
            job_options.report(text_with_code(error))
            return 1
        status.start(job.supervisor.status)
        outcome = job.wait()
    _say_last(job, outcome, options.keep_going, command)
    return outcome.exit_code(options.keep_going)


def _say_last(job: Job, outcome: Outcome, keep_going: bool, command: Sequence[str]) -> None:
    """Say which rank failed first, and what it said: later output hides that."""
    first = outcome.first_failure
    if first is None or outcome.exit_code(keep_going) == 0:
        scripts = [word for word in command if word.endswith(".py")]
        if scripts and first is None and job.size > 1 and not outcome.have_met:
            job.options.note(
                f"no rank has called init(): each of the {job.size} has run {scripts[0]} for "
                "itself, unless they have met by other means than Kolovod's. "
                f"'kolovod init {scripts[0]}' shows what to add to it"
            )
        return
    lines = job.tail(first.rank, "stderr").splitlines()[-_LAST_LINES:]
    if job.size > 1:
        said = "".join(f"\n  {line}" for line in lines)
        end = f". The last lines of its stderr:{said}" if said else "; it wrote nothing to stderr"
        report_to_stderr(f"the first to fail was {first.name}: it {first.cause}{end}")
        if (left := outcome.left_before) is not None:
            report_to_stderr(
                f"before that {left.name} had ended with exit code 0, while {first.name} still "
                "needed it: does one rank have fewer steps than another?"
            )
    if what_to_do := advice(command, "\n".join(lines)):
        report_to_stderr(what_to_do)


def _refuse_beside_mpi(options: argparse.Namespace, settings: Settings) -> None:
    shown = ("timestamps", "output_dir", "merge_output", "progress")
    placed = ("keep_going", "mpi_variables", "label_hosts", "hosts", "hostfile")
    for name in (*shown, *placed):
        if getattr(options, name) not in (None, "", False, "auto"):
            raise CommandArgumentError(
                f"--{name.replace('_', '-')} with backend mpi: mpirun starts the ranks and passes "
                "on their output; give it arguments of its own with --mpi-args"
            )
    if elastic_flags.is_elastic(options):
        settings.check_elastic()


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """Return what ``-x`` and the knobs' flags set in the ranks' environment."""
    variables = {}
    for text in options.variables:
        name, equals, value = text.partition("=")
        if not name or not equals:
            options.parser.error(f"-x {text!r}: expected NAME=VALUE")
        if name in _NEVER_HERE:
            options.parser.error(
                f"-x {name}: a command line can be read by everybody on this host; the launcher "
                "makes a secret of its own for each job"
            )
        variables[name] = value
    for knob in filter(_has_flag, KNOBS):
        value = getattr(options, f"knob_{knob.name}")
        if value is not None:
            variables[knob.environment] = _checked(knob, value)
    return variables


def _has_flag(knob: Knob) -> bool:
    return bool(knob.flag)


def _checked(knob: Knob, text: str) -> str:
    knob.parse(text, knob.flag)
    return text

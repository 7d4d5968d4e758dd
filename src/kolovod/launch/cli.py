"""The ``kolovod`` command."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kolovod.backends import check_elastic
from kolovod.config import KNOBS, Knob, load
from kolovod.core.affinity import check_affinity
from kolovod.errors import BootstrapError, InvalidArgumentError, text_with_code
from kolovod.launch import (
    check_command,
    elastic_flags,
    explain_command,
    init_command,
    manifest_command,
    plan_command,
    ps_command,
    report_command,
    stacks_command,
    top_command,
)
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.allocation import allocation
from kolovod.launch.doctor import run_doctor
from kolovod.launch.elastic_flags import rank_count
from kolovod.launch.foreground import forwarding
from kolovod.launch.hosts import HostSlots, assign, is_this_host, parse_host_file, parse_hosts
from kolovod.launch.job import Job, JobOptions, Outcome
from kolovod.launch.mpirun import run_by_mpi
from kolovod.launch.other_python import advice, not_found
from kolovod.launch.status import status_of
from kolovod.launch.streams import as_command, go_on_without_reader
from kolovod.launch.viewer import attach
from kolovod.net.encryption import require_libcrypto
from kolovod.notices import report_to, report_to_stderr
from kolovod.observe import summary
from kolovod.rendezvous.external.meeting import read_hosts
from kolovod.version import __version__

__all__ = ["command", "main"]

_EXIT_NOT_FOUND = 127
_NEVER_HERE = ("KOLOVOD_SECRET", "_HOROVOD_SECRET_KEY")
_LAST_LINES = 12  # of a failed rank's stderr


def command() -> int:
    """The console script: ``main`` with standard streams that may be missing, or fail."""
    return as_command(main)


def main(arguments: Sequence[str] | None = None, goes_on: str | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` by default); returns the exit code.

    ``goes_on``: the elastic job that an earlier launcher has begun with it (what
    ``job_folders.take_over`` needs). The code is that of the first rank that failed (128 + N for
    signal N), 0 if none did. Raises SystemExit(2) for a wrong command line, as argparse does.
    """
    parser = _parser()
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given, argparse.Namespace(given=given, goes_on=goes_on))
    if options.action is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        action: Callable[[argparse.Namespace], int] = options.act
        return action(options)
    except InvalidArgumentError as error:
        options.parser.error(str(error))
        raise  # not reached: error() exits


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
        help="start a command several times, as the ranks of one world",
        description="Start COMMAND N times, on this host or on those of -H, as ranks 0 to N-1 of "
        "one world. Exits with the code of the first rank that fails, after ending the others.",
        usage="kolovod run [-np N] [-H HOST:SLOTS,...] [options] [--] COMMAND ...",
        allow_abbrev=False,
    )
    run.set_defaults(parser=run, act=_run)
    run.add_argument(
        "-np", "--num-proc", type=rank_count, metavar="N", help="ranks [all slots of the hosts]"
    )
    _add_hosts(run)
    elastic_flags.add(run)
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
        "--merge-output",
        action="store_true",
        help="show a line once that several ranks write within half a second: [0-3]<stdout>:line",
    )
    said = run.add_mutually_exclusive_group()
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
    run.add_argument(
        "--keep-going",
        action="store_true",
        help="let the other ranks go on when one ends: they can form a smaller world",
    )
    run.add_argument(
        "--mpi-variables",
        action="store_true",
        help="also set OMPI_COMM_WORLD_RANK, _SIZE and the like, for programs that read those",
    )
    run.add_argument(
        "--label-hosts",
        default="",
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
        "--env",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable for the ranks; they inherit all others, on other hosts but those "
        "that describe a login",
    )
    knobs = run.add_argument_group(
        "knobs (also by environment variable; see docs/configuration.md)"
    )
    for knob in filter(_has_flag, KNOBS):
        dest, text = f"knob_{knob.name}", knob.text.replace("%", "%%")
        if knob.switch:
            knobs.add_argument(knob.flag, dest=dest, action="store_const", const="1", help=text)
            continue
        metavar = (knob.unit or "value").upper()
        knobs.add_argument(knob.flag, dest=dest, metavar=metavar, help=f"{text} [{knob.default}]")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    check_command.add(actions)
    init_command.add(actions)
    ps_command.add(actions)
    stacks_command.add(actions)
    top_command.add(actions)
    _add_attach(actions)
    _add_timeline(actions)
    report_command.add(actions)
    plan_command.add(actions)
    _add_doctor(actions)
    manifest_command.add(actions)
    explain_command.add(actions)
    return parser


def _add_attach(actions: Any) -> None:
    attaching = actions.add_parser(
        "attach",
        help="show an elastic job whose launcher has ended",
        description="An elastic job goes on if `kolovod run` ends, by a lost connection or a "
        "signal that cannot be passed on. This shows what the job has written since, and what it "
        "writes from now on, passes signals on to it, and exits with its code.",
        allow_abbrev=False,
    )
    attaching.set_defaults(parser=attaching, act=_attach)
    text = "its number; needed where there are several"
    attaching.add_argument("job", nargs="?", metavar="JOB", help=text)


def _attach(options: argparse.Namespace) -> int:
    go_on_without_reader()
    return attach(options.job)


def _add_doctor(actions: Any) -> None:
    doctor = actions.add_parser(
        "doctor",
        help="check this host, or those of -H, for what keeps jobs from running well",
        description="Look at versions, frameworks, GPUs, MPI, memory, limits and cores of every "
        "host, and at the links between them; print what to do. Exits with 1 if a job would not "
        "start. (`kolovod check` looks at a script.)",
        allow_abbrev=False,
    )
    doctor.set_defaults(
        parser=doctor,
        act=_examine,
        num_proc=None,
        label_hosts="",
        host_discovery_script=None,
        max_np=None,
    )
    _add_hosts(doctor)


def _examine(options: argparse.Namespace) -> int:
    hosts, ssh = ["localhost"], None
    if options.hosts or options.hostfile:
        places, ssh = _places(options)
        hosts = [place.name for place in places]
    return run_doctor(hosts, ssh)


def _add_hosts(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("several hosts (reached by ssh, without a question)")
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H", "--hosts", metavar="A:4,B:4", help="hosts, and how many ranks each may take"
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="the same, in lines HOST slots=N")
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="a private key")
    group.add_argument(
        "--ssh-args",
        type=shlex.split,
        default=[],
        metavar="TEXT",
        help='further arguments of ssh, as one text: "-F FILE -o StrictHostKeyChecking=accept-new"',
    )
    group.add_argument(
        "--remote-python",
        default="",
        metavar="PATH",
        help="the Python with Kolovod on the other hosts [this one's path]",
    )
    group.add_argument(
        "--directory", default="", metavar="DIR", help="where ranks on other hosts run [this one]"
    )


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


def _run(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        options.parser.error("no COMMAND to run, for example: kolovod run -np 2 python train.py")
    variables = _variables(options)
    places, ssh = _places(options)
    hosts = assign(places, options.num_proc) if places else []
    settings = load({**os.environ, **variables})
    check_affinity(settings.thread_affinity, hosts)
    here = ssh is None or any(is_this_host(host) for host in dict.fromkeys(hosts))
    if here and (problem := not_found(command)):
        report_to_stderr(problem)
        return _EXIT_NOT_FOUND
    if settings.backend == "mpi":
        _refuse_beside_mpi(options)
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
        status.start(job.status)
        outcome = job.wait()
    _say_last(job, outcome, options.keep_going, command)
    return outcome.exit_code(options.keep_going)


def _ssh(options: argparse.Namespace) -> SshOptions:
    """How other hosts are reached."""
    return SshOptions(
        port=options.ssh_port,
        identity=options.ssh_identity_file,
        arguments=options.ssh_args,
        python=options.remote_python,
        directory=options.directory,
    )


def _places(options: argparse.Namespace) -> tuple[list[HostSlots], SshOptions | None]:
    """Where ranks may run, and how other hosts are reached; None if all run here.

    No places if a script will name them.
    """
    size: int | None = options.num_proc
    if options.host_discovery_script:
        elastic_flags.check_discovery(options)
        return [], _ssh(options)
    if options.label_hosts:
        if options.hosts or options.hostfile:
            raise InvalidArgumentError(
                "--label-hosts beside -H or --hostfile: it labels ranks that all run here"
            )
        return parse_hosts(options.label_hosts), None
    if options.hosts:
        return parse_hosts(options.hosts), _ssh(options)
    if options.hostfile:
        return parse_host_file(_text_of(options.hostfile), options.hostfile), _ssh(options)
    listed = allocation(os.environ, read_hosts)
    if len(listed) >= 2:  # a single host is this one
        return listed, _ssh(options)
    if size is None:
        raise InvalidArgumentError("-np N, -H or --hostfile must say how many ranks to start")
    return [HostSlots("localhost", max(size, options.max_np or 0))], None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the host file {path} cannot be read: {error}") from None


def _say_last(job: Job, outcome: Outcome, keep_going: bool, command: Sequence[str]) -> None:
    """Which rank failed first, and what it said: what comes after it hides that."""
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


def _refuse_beside_mpi(options: argparse.Namespace) -> None:
    shown = ("timestamps", "output_dir", "merge_output", "progress")
    placed = ("keep_going", "mpi_variables", "label_hosts", "hosts", "hostfile")
    for name in (*shown, *placed):
        if getattr(options, name) not in (None, "", False, "auto"):
            raise InvalidArgumentError(
                f"--{name.replace('_', '-')} with backend mpi: mpirun starts the ranks and passes "
                "on their output; give it arguments of its own with --mpi-args"
            )
    if elastic_flags.is_elastic(options):
        check_elastic("mpi")


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """What ``-x`` and the knobs' flags set in the ranks' environment."""
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

"""``kolovod check``: run a script on a few ranks for a few steps, and say how it trains."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kolovod import checking
from kolovod.checking.compare import judge
from kolovod.checking.compare_steps import failed_by_itself
from kolovod.checking.facts import Facts, load_all
from kolovod.checking.findings import PROBLEM, Finding, Rank, counted
from kolovod.checking.recorder import VARIABLE
from kolovod.checking.report import as_json, summary, text
from kolovod.config import load
from kolovod.errors import CommandArgumentError
from kolovod.launch.elastic_flags import rank_count
from kolovod.launch.foreground import forwarding
from kolovod.launch.job import Job, JobOptions, Outcome
from kolovod.launch.other_python import not_found
from kolovod.notices import report_to_stderr

__all__ = ["add"]

_STARTUP = Path(checking.__file__).parent / "startup"
_PROBLEMS, _FAILED, _TOO_LATE, _NOT_FOUND = 1, 3, 124, 127
_REPORT_S, _FAILURE_S = 10.0, 60.0  # of a rank that keeps the others waiting


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.usage = (
        "kolovod check [-np N] [--steps N] [--epochs N] [--timeout S] [--json FILE] [--] "
        "COMMAND ..."
    )
    parser.description = (
        "Start COMMAND on a few ranks of this host, watch it for some steps of its "
        "optimizer, end it there, and say whether weights, data, random numbers, learning rate "
        "and files are what they should be on each rank. The script needs no change. Exits with 0 "
        "if there is no problem, 1 if there are some, 3 if the script itself failed, 124 if it "
        "came to no end within the time. (`kolovod doctor` checks hosts, not scripts.)"
    )
    parser.set_defaults(act=_check)
    parser.add_argument(
        "-np", "--num-proc", type=rank_count, default=2, metavar="N", help="ranks [2]"
    )
    parser.add_argument(
        "--steps", type=_positive, default=10, metavar="N", help="of the optimizer, then end [10]"
    )
    parser.add_argument(
        "--epochs", type=_positive, metavar="N", help="end each epoch after so many batches as "
        "--steps says, and the script after N epochs: what it does between them is seen, too. It "
        "writes its files then, checkpoints of a model that has learned nothing",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=_seconds, default=300.0, metavar="S", help="seconds for all [300]"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the findings there, for programs"
    )
    parser.add_argument(
        "--show-output", action="store_true", help="show what the ranks print while they run"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")


def _positive(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given!r}: expected a whole number of at least 1")
    return int(given)


def _seconds(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 86_400.0:
        raise argparse.ArgumentTypeError(f"{given!r}: expected seconds, above 0, a day at most")
    return value


@dataclass(frozen=True)
class _Run:
    """The run of a checked script."""

    ranks: list[Rank]
    stopped_by: int | None


def _check(options: argparse.Namespace) -> int:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise CommandArgumentError(
            "no COMMAND to check, for example: kolovod check -- python train.py"
        )
    if options.num_proc < 2:
        raise CommandArgumentError("-np 1: ranks are compared with each other, so start 2 or more")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise CommandArgumentError(f"--json {str(options.json)!r}: there is no such folder")
    if problem := not_found(command):
        report_to_stderr(problem)
        return _NOT_FOUND
    run = _watch(command, options)
    if run.stopped_by is not None:
        return 128 + run.stopped_by
    findings = judge(run.ranks)
    code = _exit_code(findings, run.ranks)
    extent = f"{options.steps} steps at most"
    if options.epochs is not None:
        extent = f"{counted(options.epochs, 'epoch')} of {extent}"
    print(f"{len(run.ranks)} ranks, {extent}: {shlex.join(command)}\n")
    print(f"{text(findings)}\n\n{summary(findings)}")
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(as_json(findings, len(run.ranks), code), indent=2))
        except OSError as error:
            raise CommandArgumentError(
                f"--json {str(options.json)!r} cannot be written: {error.strerror}"
            ) from None
    return code


def _exit_code(findings: Sequence[Finding], ranks: Sequence[Rank]) -> int:
    if failed_by_itself(ranks) is not None:
        return _FAILED
    if any(finding.verdict == PROBLEM for finding in findings):
        return _PROBLEMS
    return _TOO_LATE if any(rank.is_late for rank in ranks) else 0


def _watch(command: Sequence[str], options: argparse.Namespace) -> _Run:
    """Run the command to the end of the check."""
    size: int = options.num_proc
    with tempfile.TemporaryDirectory(prefix="kolovod-check-") as name:
        folder = Path(name)
        environment = _environment(os.environ, folder, options)
        job_options = JobOptions(
            environment=environment,
            output_dir=folder / "output",
            stdout=sys.stdout if options.show_output else None,
            stderr=sys.stderr if options.show_output else None,
        )
        with Job(size, job_options) as job, forwarding(job):
            job.start(lambda rank: command)
            outcome = job.wait(options.timeout)
        facts = load_all(folder, size)
        ranks = [_rank(rank, facts[rank], outcome, job, folder) for rank in range(size)]
    return _Run(ranks, outcome.stopped_by)


def _environment(
    environ: Mapping[str, str], folder: Path, options: argparse.Namespace
) -> dict[str, str]:
    """Return the variables with which Python watches the script for the check.

    With them a rank that waits for another says so in time.
    """
    search = [str(_STARTUP), *filter(None, [environ.get("PYTHONPATH")])]
    steps, batches, timeout_s = options.steps, 0, options.timeout
    if options.epochs is not None:  # the step after the last one is that of another epoch
        steps, batches = options.steps * options.epochs + 1, options.steps
    added = {VARIABLE: f"{steps} {batches} {folder}", "PYTHONPATH": os.pathsep.join(search)}
    if load(environ).late_failure_s == 0.0:
        added["KOLOVOD_LATE_FAILURE_S"] = f"{min(_FAILURE_S, timeout_s / 2):g}"
        added["KOLOVOD_LATE_REPORT_S"] = f"{min(_REPORT_S, timeout_s / 4):g}"
    return added


def _rank(rank: int, facts: Facts | None, outcome: Outcome, job: Job, folder: Path) -> Rank:
    ends = [end for end in outcome.ended if end.rank == rank]
    code = ends[0].exit_code if ends else 0
    is_late = rank in outcome.late
    is_first = outcome.first_failure is not None and outcome.first_failure.rank == rank
    was_ended = is_late or (bool(ends) and ends[0].code < 0 and not is_first)
    lines = {}
    for stream in ("stdout", "stderr"):
        [file] = folder.glob(f"output/rank.{rank:0{len(str(job.size - 1))}d}/{stream}")
        lines[stream] = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return Rank(rank, facts, code, is_late, was_ended, lines["stdout"], lines["stderr"])

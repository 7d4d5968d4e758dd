"""``kolovod stacks``: where the ranks of a job are at this moment."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence

from kolovod.core.stacks import StacksUnavailableError, of_process
from kolovod.errors import CommandArgumentError
from kolovod.launch.running_jobs import RunningJob, RunningRank, running_jobs
from kolovod.launch.stacks_text import main_first

__all__ = ["add", "add_job", "chosen"]


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "The Python stacks of all threads of each rank of a job on this host, at this "
        "moment. The job goes on; a rank answers also while it is in native code. On each host "
        "of the job it shows that host's ranks."
    )
    parser.set_defaults(act=_print)
    add_job(parser)
    parser.add_argument(
        "--rank", type=int, metavar="N", help="only this rank; in an elastic job this slot"
    )


def add_job(action: argparse.ArgumentParser) -> None:
    """Add the argument that ``chosen`` gets."""
    action.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="as `kolovod ps` names it, or its "
        "beginning; needed where there are several",
    )  # fmt: skip


def _print(options: argparse.Namespace) -> int:
    job = chosen(running_jobs(), options.job)
    ranks = [each for each in job.ranks if options.rank in (None, each.rank)]
    if not ranks:
        there = ", ".join(str(each.rank) for each in job.ranks)
        raise CommandArgumentError(
            f"--rank {options.rank}: on this host job {job.name} has {job.kind} {there}"
        )
    code = 0
    for each in ranks:
        print(f"{job.kind} {each.rank}, pid {each.pid}:")
        try:
            print(textwrap.indent(main_first(_of_rank(each)), "  "))
        except StacksUnavailableError as error:
            print(f"  no stacks: {error}")
            code = 1
    return code


def _of_rank(rank: RunningRank) -> str:
    """Return the stacks of the first of its processes that says where it is.

    A shell may have started Python.
    """
    said: StacksUnavailableError | None = None
    for pid in sorted({rank.pid, *rank.pids}):
        try:
            return of_process(pid)
        except StacksUnavailableError as error:
            said = said or error
    assert said is not None
    raise said


def chosen(jobs: Sequence[RunningJob], name: str) -> RunningJob:
    """Return the job whose name begins so. Raises InvalidArgumentError if that is not one.

    This user's come first: others may give their jobs any name.
    """
    fitting = [job for job in jobs if job.name.startswith(name)]
    own = [job for job in fitting if job.uid == os.geteuid()]
    fitting = own or fitting
    if len(fitting) == 1:
        return fitting[0]
    here = ", ".join(job.name for job in jobs) or "none"
    if name and not fitting:
        raise CommandArgumentError(f"JOB {name!r}: no such job is on this host; there are {here}")
    if not jobs:
        raise CommandArgumentError("no job has a rank on this host")
    raise CommandArgumentError(f"JOB {name!r}: several jobs are on this host, {here}: name one")

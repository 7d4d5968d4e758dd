"""``kolovod ps``: which jobs run on this host."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from kolovod.launch.running_jobs import RunningJob, running_jobs
from kolovod.observe.units import duration_text
from kolovod.printable import printable

__all__ = ["add", "format_jobs"]

_STATES = {"R": "", "S": "", "D": "", "T": "stopped", "t": "stopped", "Z": "ended"}


def add(parser: argparse.ArgumentParser) -> None:
    """Give the command its arguments."""
    parser.description = (
        "The jobs of this user (as root: of all) with processes on this host. CPU and "
        "memory are those of all processes that a job has here, data loaders too; memory that "
        "several share counts in each. Of jobs that srun, mpirun, torchrun and others start it is "
        "the processes that have called init()."
    )
    parser.set_defaults(act=_list)
    parser.add_argument("--ranks", action="store_true", help="also each rank's process")
    parser.add_argument("--json", action="store_true", help="for programs")


def _list(options: argparse.Namespace) -> int:
    jobs = running_jobs()
    if options.json:
        print(json.dumps([asdict(job) for job in jobs], indent=2))
        return 0
    print(format_jobs(jobs, with_ranks=options.ranks) if jobs else "no job has a rank on this host")
    return 0


def format_jobs(jobs: Sequence[RunningJob], *, with_ranks: bool) -> str:
    """Return the jobs as a table for people."""
    head = ["JOB", "RANKS", "HERE", "HOSTS", "SINCE", "CPU", "MEMORY", "COMMAND"]
    users = _users(jobs)
    rows = [[head[0], *(["USER"] if users else []), *head[1:]]]
    for job in jobs:
        oldest_s = max(each.age_s for each in job.ranks)
        size = f"{job.size}, elastic" if job.is_elastic else str(job.size)
        cpu = f"{100 * job.cpu_s / oldest_s:.0f} %" if oldest_s > 0 else "-"
        memory = f"{job.memory_bytes / (1 << 30):.1f} GiB"
        here, command = str(len(job.ranks)), shlex.join(job.ranks[0].command)
        who = [job.name, *([users[job.uid]] if users else [])]
        rows.append(
            [*who, size, here, str(job.hosts), duration_text(oldest_s), cpu, memory, command]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, _one_line(row[-1])]).rstrip())
        if with_ranks and number > 0:
            lines += _ranks(jobs[number - 1])
    return "\n".join(lines)


def _users(jobs: Sequence[RunningJob]) -> dict[int, str]:
    """Return the users' names, by number; none if all jobs are this user's."""
    uids = {job.uid for job in jobs}
    return {} if uids <= {os.geteuid()} else {uid: _user_name(uid) for uid in uids}


def _user_name(uid: int) -> str:
    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except KeyError:
        return str(uid)


def _ranks(job: RunningJob) -> list[str]:
    lines = []
    for each in job.ranks:
        line = f"  {job.kind} {each.rank}  pid {each.pid}  {duration_text(each.age_s)}"
        lines.append(f"{line}  {_STATES.get(each.state, '')}".rstrip())
    return lines


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))

"""The jobs whose ranks run on this host, as /proc tells.

Processes that a launcher of ours has started have the job's name in their environment. Ranks that
srun, mpirun, torchrun and others start are known by what they show (observe/live/page.py) as soon
as they have called ``init``; what these have started counts as nobody's. All of that is the word of
whoever runs a process, so a job is of one user, and root looks as that user at what is shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from kolovod.core.other_process import PROC, OtherProcess
from kolovod.launch.orphan_reaper import MARK_NAME
from kolovod.observe.live.page import PageReader, PageUnavailableError
from kolovod.printable import printable

__all__ = ["RunningJob", "RunningRank", "running_jobs"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NUMBER = re.compile("[0-9]{1,9}")
_AGAIN_S = 5.0  # a process may begin to show itself


@dataclass(frozen=True)
class RunningRank:
    """A rank's process. ``rank``: its slot, in an elastic job that our launcher has started."""

    rank: int
    pid: int
    command: tuple[str, ...]
    age_s: float
    state: str
    """The kernel's letter: R running, S sleeping, D in a system call, T stopped, Z ended."""
    pids: tuple[int, ...] = ()
    """All processes of the rank: where a shell has started Python, that is one of them."""
    cpu_s: float = 0.0
    """The CPU time that these have used so far."""
    memory_bytes: int = 0
    """The resident memory."""


@dataclass
class RunningJob:
    """All processes of a job on this host, what its ranks have started included."""

    name: str
    """The first eight digits of what marks its processes, the same on all hosts."""
    size: int = 0
    """Ranks that it began with, on all hosts."""
    hosts: int = 0
    """Hosts that it began with."""
    is_elastic: bool = False
    ranks: list[RunningRank] = field(default_factory=list)
    processes: int = 0
    cpu_s: float = 0.0
    """The CPU time that its living processes have used so far."""
    memory_bytes: int = 0
    """The resident memory, where pages that several processes share count in each."""
    uid: int = field(default_factory=os.geteuid)
    """The user whose job it is."""

    @property
    def kind(self) -> str:
        """The kind of its numbers: in an elastic job a process keeps its slot, not its rank."""
        return "slot" if self.is_elastic else "rank"


@dataclass(frozen=True)
class _Process:
    pid: int
    uid: int
    parent: int
    state: str
    cpu_s: float
    begun_s: float
    """The time of its start, since the host was started."""
    memory_bytes: int
    environment: dict[str, str]
    rank: int | None
    """The rank that it has been told to be, or its parent has; its slot in an elastic job."""

    @property
    def job(self) -> tuple[int, str]:
        """Its user, and the mark: others may give theirs the same."""
        return self.uid, self.environment[MARK_NAME]


def running_jobs(proc: Path = PROC, uid: int | None = None) -> list[RunningJob]:
    """Return the jobs of this user (of all, for root, or of user ``uid``), the oldest first.

    ``proc``: the path of /proc.
    """
    now_s = float((proc / "uptime").read_text().split()[0])
    marked = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (process := _read(entry, uid)) is not None:
            marked[process.pid] = process
    jobs: dict[tuple[int, str], RunningJob] = {}
    by_rank: dict[int, list[_Process]] = {}
    for process in marked.values():
        job = jobs.setdefault(
            process.job, RunningJob(printable(process.job[1][:8]), uid=process.uid)
        )
        job.processes += 1
        job.cpu_s += process.cpu_s
        job.memory_bytes += process.memory_bytes
        if (first := _first_of_rank(process, marked)) is not None:
            by_rank.setdefault(first.pid, []).append(process)
    for pid, own in by_rank.items():
        first = marked[pid]
        assert first.rank is not None
        _add_rank(jobs[first.job], first, first.rank, own, proc, now_s)
    found = [job for job in jobs.values() if job.ranks]
    for job in found:
        job.ranks.sort(key=lambda each: (each.rank, each.pid))
    return sorted(found, key=lambda job: -max(each.age_s for each in job.ranks))


def _first_of_rank(process: _Process, marked: dict[int, _Process]) -> _Process | None:
    """Return the process that the launcher has started as this one's rank."""
    found = None
    while process.rank is not None:
        found = process
        above = marked.get(process.parent)
        if above is None or above.job != process.job:
            break
        process = above
    return found


def _add_rank(
    job: RunningJob, process: _Process, rank: int, own: list[_Process], proc: Path, now_s: float
) -> None:
    """Add a rank, unless it has ended meanwhile. ``own``: all processes of that rank."""
    try:
        with contextlib.closing(OtherProcess(process.pid, proc)) as found:
            if found.uid != process.uid:
                return
            command = tuple(found.words("cmdline"))
    except OSError:
        return
    given = process.environment
    job.is_elastic = "KOLOVOD_ELASTIC" in given
    job.size = max(job.size, _number(given, "KOLOVOD_SIZE") or 0)
    job.hosts = max(job.hosts, _number(given, "KOLOVOD_CROSS_SIZE") or 0)
    age_s = now_s - process.begun_s
    job.ranks.append(
        RunningRank(
            rank,
            process.pid,
            command,
            age_s,
            process.state,
            tuple(sorted(each.pid for each in own)),
            sum(each.cpu_s for each in own),
            sum(each.memory_bytes for each in own),
        )
    )


def _read(entry: Path, uid: int | None) -> _Process | None:
    """Return a process of a job; None: it is none, is another user's, or has just ended."""
    try:
        with contextlib.closing(OtherProcess(int(entry.name), entry.parent)) as process:
            if uid is not None and process.uid != uid:
                return None
            words = process.words("environ")
            environment = dict(word.split("=", 1) for word in words if word.startswith("KOLOVOD_"))
            # After the command's name, which may have any characters.
            stat = process.read("stat").decode(errors="replace")
            fields = stat.rpartition(")")[2].split()
            if not environment.get(MARK_NAME):
                shown = _shown(entry, fields[19])
                if not shown:
                    return None
                environment |= shown
            return _Process(
                pid=process.pid,
                uid=process.uid,
                parent=int(fields[1]),
                state=fields[0],
                cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
                begun_s=int(fields[19]) / _TICKS_PER_S,
                memory_bytes=int(fields[21]) * _PAGE_BYTES,
                environment=environment,
                rank=_number(environment, "KOLOVOD_SLOT", "KOLOVOD_RANK"),
            )
    except (OSError, ValueError, IndexError):
        return None


_looked: dict[tuple[str, str], tuple[float, dict[str, str]]] = {}


def _shown(entry: Path, begun: str) -> dict[str, str]:
    """Return the variables that a rank which shows itself would have; none for others.

    They are asked for anew every five seconds: to look through the descriptors of all processes
    takes time.
    """
    now_s = time.monotonic()
    for key, (since_s, _) in list(_looked.items()):
        if now_s - since_s > 2 * _AGAIN_S:
            del _looked[key]
    looked_s, found = _looked.get((str(entry), begun), (-_AGAIN_S, {}))
    if now_s - looked_s < _AGAIN_S:
        return found
    found = {}
    with contextlib.suppress(PageUnavailableError):
        reader = PageReader(int(entry.name), entry.parent)
        with contextlib.closing(reader):
            facts = reader.read()
        if "rank" in facts:
            found = {
                MARK_NAME: facts["job"],
                "KOLOVOD_RANK": str(facts["rank"]),
                "KOLOVOD_SIZE": str(facts["size"]),
                "KOLOVOD_CROSS_SIZE": str(len(set(facts["hosts"]))),
            }
            if facts["slot"] is not None:
                found |= {"KOLOVOD_ELASTIC": "1", "KOLOVOD_SLOT": str(facts["slot"])}
    _looked[str(entry), begun] = now_s, found
    return found


def _number(environment: dict[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set, if it is a number."""
    text = next((environment[name] for name in names if name in environment), "")
    return int(text) if _NUMBER.fullmatch(text) else None

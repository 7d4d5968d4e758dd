"""A job: ranks on this host and on others, started together and seen through to the end.

The first rank that fails ends the job: this is its policy in the supervisor's loop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from kolovod import blame
from kolovod.config import load
from kolovod.launch.agent_line import SshOptions
from kolovod.launch.fleet import Fleet, Group, Meeting, Sink
from kolovod.launch.local import GRACE_S, MAY_RUN_ON_CODE, Ended, Order, rank_name
from kolovod.launch.output import Output
from kolovod.launch.progress import Progress
from kolovod.launch.saved_state import Persistence
from kolovod.launch.standstill import LOOK_S, Standstill
from kolovod.launch.supervisor import Phase, Policy, Supervisor
from kolovod.net.channel import new_secret
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Job", "JobOptions", "Outcome"]

_PROGRESS_S = 0.5
_LAST_WORDS_S = 0.5  # from a failure to SIGTERM: for the others to say what they have met


@dataclass(frozen=True)
class JobOptions:
    """The options of a job."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, over the launcher's own."""
    timestamps: bool = False
    output_dir: Path | None = None
    """Also write each rank's output, unmarked, to rank.N/stdout and rank.N/stderr below it."""
    mpi_variables: bool = False
    """Also set what ``mpirun`` would (``RankEnvironment.mpi_variables``)."""
    keep_going: bool = False
    hosts: Sequence[str] = ()
    """The host of each rank, if not all the same."""
    ssh: SshOptions | None = None
    """The options by which hosts other than this one are reached. None: ``hosts`` are but labels,
    all run here."""
    payload: bytes | None = None
    """Bytes that every rank is given in memory, with a file for its result
    (``HostRanks.start``)."""
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    """The streams to which the ranks' output goes; None: nowhere."""
    merge_output: bool = False
    """Show lines once that several ranks write within a moment."""
    report: Callable[[str], None] = lambda text: None
    """Called with each thing that the launcher itself has to say."""
    on_progress: Callable[[Progress], None] | None = None
    """Called in ``Job.wait`` twice a second, and when the job is closed. What it raises ends it."""
    quiet: bool = False
    """Say failures only."""
    has_input: bool = False
    """Rank 0 reads the launcher's standard input, if it runs on this host."""
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    """Starts the ranks of this host (``HostRanks``)."""
    fleet: Callable[[Sink], Fleet] | None = None
    """Makes the hosts where others than ssh hand out processes (``kolovod.clusters``)."""

    def note(self, text: str) -> None:
        """Report a text that is no failure, unless the job is ``quiet``."""
        if not self.quiet:
            self.report(text)

    def make_fleet(self, sink: Sink, persistence: Persistence | None = None) -> Fleet:
        """Return the hosts of the job; see Fleet."""
        if self.fleet is not None:
            return self.fleet(sink)
        return Fleet(self.ssh, sink, self.popen, persistence, self.report)

    def make_output(self, size: int, *, most: int = 0, asks: int | None = None) -> Output:
        """Return the output of the job's ranks; see Output."""
        return Output(
            size,
            {"stdout": self.stdout, "stderr": self.stderr},
            _now_text if self.timestamps else None,
            self.output_dir,
            self.report,
            most,
            merges=self.merge_output,
            asks=asks,
        )


@dataclass
class Outcome:
    """The outcome of a job."""

    ended: list[Ended] = field(default_factory=list)
    """The ends of its processes, in their order."""
    first_failure: Ended | None = None
    """The rank that failed first by itself: not told to end, nor because another one had failed."""
    stopped_by: int | None = None
    """The signal that the launcher was sent."""
    late: tuple[int, ...] = ()
    """Ranks that were still at work at the job's deadline."""
    have_met: bool = False
    """Whether any rank has called ``init``."""
    left_before: Ended | None = None
    """A rank that ended well, which ``first_failure`` still needed."""

    may_run_on: bool = False
    """After the job was closed: nobody could find out whether all of its ranks have ended."""

    def exit_code(self, keep_going: bool) -> int:
        """Return the exit code for the launcher."""
        code = self._exit_code(keep_going)
        return MAY_RUN_ON_CODE if code and self.may_run_on else code

    def _exit_code(self, keep_going: bool) -> int:
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first_failure is None or (keep_going and any(e.code == 0 for e in self.ended)):
            return 0
        return self.first_failure.exit_code


class Job(Policy):
    """A job of ``size`` ranks. A context manager: leaving it leaves nothing behind."""

    def __init__(self, size: int, options: JobOptions) -> None:
        # First, since it may refuse what it finds: nothing is open yet.
        limits = load({**os.environ, **options.environment})
        self.size = size
        self.options = options
        self._hosts = list(options.hosts) or ["localhost"] * size
        self._secret = new_secret()
        self._has_input = options.has_input and not _is_in_background()
        asks = 0 if self._has_input and os.isatty(0) else None
        self._output = options.make_output(size, asks=asks)
        self._fleet = options.make_fleet(self._write)
        self.supervisor = Supervisor(self, self._fleet, self._output, options.note)
        self._store: RendezvousServer | None = None
        self._began: float | None = None
        self._told_at = -_PROGRESS_S
        self._timeout_s = 0.0
        self._deadline: float | None = None
        self._failed: list[int] = []  # by themselves, in the order of their ends
        self._standstill = Standstill(limits.late_report_s, limits.late_failure_s)
        self._looked_at = 0.0
        self._given_up: set[int] = set()
        self.outcome = Outcome()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.supervisor.close()
        finally:
            self.outcome.may_run_on = self.supervisor.may_run_on
            self._tell_progress(final=True)

    # --- the beginning ---

    def start(self, command: Callable[[int], Sequence[str]]) -> None:
        """Start every rank: ``command(rank)``.

        Raises BootstrapError, before any rank is started, if hosts cannot be reached: each with its
        reason.
        """
        if not self._fleet.connect(self._hosts, self.supervisor.is_told_to_end):
            self.supervisor.obey_signals()
            return
        store_addresses = self._open_store()
        self._began = time.monotonic()
        self.supervisor.advance(Phase.RUNNING)
        for group in self._fleet.groups:
            ranks = [rank for rank in range(self.size) if self._group_of(rank) is group]
            orders = [self._order(rank, command(rank), store_addresses) for rank in ranks]
            if self._has_input and group is self._fleet.here and ranks[0] == 0:
                orders[0] = replace(orders[0], has_input=True)
            group.start(orders, self.options.payload)

    def _write(self, rank: int, stream: str, data: bytes) -> None:
        """Pass output on, except of ranks that are not there: a host is not trusted in that."""
        if 0 <= rank < self.size:
            self._output.write(rank, stream, data)

    def _open_store(self) -> dict[str, str]:
        """Start the rendezvous server; returns where each host finds it, "ip:port" or several."""
        meeting = Meeting(self._fleet, self.options.environment)
        port = meeting.port
        self._store = RendezvousServer(self._secret, self.size, *meeting.addresses, port=port)
        if len(set(self._hosts)) > 1:
            self._store.host_of = self._hosts
        self.supervisor.lasting.callback(self._store.close)
        self._store.start()
        address = self._store.address
        return {
            host: meeting.seen_from(address, is_remote=host in self._fleet.remote)
            for host in self._hosts
        }

    def _order(self, rank: int, command: Sequence[str], stores: Mapping[str, str]) -> Order:
        host = self._hosts[rank]
        environment = RankEnvironment(
            rank,
            self.size,
            *local_and_cross(self._hosts, rank),
            host=host,
            rendezvous=stores[host],
            secret=self._secret,
        )
        torch = self._fleet.torch_server(self._hosts[0], stores[host])
        variables = self.options.environment
        if self.options.mpi_variables:
            variables = {**environment.mpi_variables(), **variables}
        return self._fleet.order(rank, command, environment, variables, torch)

    # --- while it runs ---

    def world_size(self) -> int:
        """Implement ``Policy.world_size``."""
        return self.size

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until every rank has ended, or end them all after ``timeout_s``.

        On the deadline the ranks are sent SIGABRT first, so that those with faulthandler enabled
        print where they are.
        """
        if timeout_s is not None:
            self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self.supervisor.run()
        self.outcome.stopped_by = self.supervisor.stopped_by
        self.outcome.have_met = self._store is not None and self._store.has_been_asked
        return self.outcome

    def look(self) -> Sequence[float | None]:
        """Implement ``Policy.look``."""
        self._note(self._fleet.collect())
        self._name_first()
        self._look_at_stopped()
        running, first = self._fleet.running, self.outcome.first_failure
        if first is not None and self.supervisor.is_due(Phase.LAST_WORDS):
            self.supervisor.stop(signal.SIGTERM, f"{first.name} {first.cause}")
        if running and self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            self.outcome.late = tuple(sorted(running))
            self.supervisor.stop(
                signal.SIGABRT, f"the job's time of {self._timeout_s:g} s was over"
            )
        if running:
            self._tell_progress()
        now = time.monotonic()
        progress_at = None if self.options.on_progress is None else now + _PROGRESS_S
        return self._deadline, progress_at, now + LOOK_S if self.outcome.ended else None

    def _tell_progress(self, *, final: bool = False) -> None:
        tell, now = self.options.on_progress, time.monotonic()
        if tell is None or self._began is None or (now - self._told_at < _PROGRESS_S and not final):
            return
        self._told_at = now
        running = () if final else tuple(sorted(self._fleet.running))
        succeeded = tuple(sorted(end.rank for end in self.outcome.ended if end.code == 0))
        lines = self._output.last_lines("stdout")
        tell(Progress(self.size, running, succeeded, now - self._began, lines))

    def tail(self, rank: int, stream_name: str) -> str:
        """Return the last lines of a rank's "stdout" or "stderr"; after ``close``."""
        return self._output.tail(rank, stream_name)

    def _group_of(self, rank: int) -> Group:
        return self._fleet.group(self._hosts[rank])

    def _note(self, ended: Sequence[Ended]) -> None:
        several = len(set(self._hosts)) > 1
        for end in ended:
            if several and not end.host:
                end = replace(end, host=self._hosts[end.rank])
            self.outcome.ended.append(end)
            if self._store is not None:
                self._store.mark_dead(end.rank, end.cause)
            first = self.outcome.first_failure
            if end.lost and first is not None and end.time < first.time:
                self.outcome.first_failure = end  # silent before the others failed: their cause
                self.options.report(f"{end.name} {end.cause}")
            elif end.rank in self._given_up or (end.code != 0 and not self.supervisor.is_stopping):
                self._failed.append(end.rank)
                if self.options.keep_going:
                    self.options.report(f"{end.name} {end.cause}; the others go on")

    def _name_first(self) -> None:
        """Decide who failed first, and end the others.

        A rank that blames one which still runs is not named at once: that one is about to end, too.
        """
        if not self._failed or (self.outcome.first_failure and not self.options.keep_going):
            return
        ends = {end.rank: end for end in self.outcome.ended}
        blames = {end.rank: end.blames for end in ends.values()}
        well = {end.rank for end in ends.values() if end.code == 0}
        running = self._fleet.running
        first, may_tell_more = blame.first_cause(self._failed[0], blames, running, well)
        if self.options.keep_going:
            self.outcome.first_failure = ends[first]
            return
        self.supervisor.advance(Phase.NAMING, GRACE_S)
        if may_tell_more and not self.supervisor.is_due(Phase.NAMING):
            return
        self.supervisor.advance(Phase.LAST_WORDS, _LAST_WORDS_S)
        self.outcome.first_failure = ends[first]
        blamed = blames[first]
        self.outcome.left_before = ends[blamed] if blamed is not None and blamed in well else None
        left = f"; ending the other {len(running)}" if running else ""
        self.options.report(f"{ends[first].name} {ends[first].cause}{left}")

    def _look_at_stopped(self) -> None:
        """Ranks that are stopped, and nobody is left to wait for them."""
        now = time.monotonic()
        if not self.outcome.ended or self.supervisor.is_stopping or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stopped = self._fleet.stopped()
        running = self._fleet.running
        due = self._standstill.look(now, running, stopped)
        names = ", ".join(self._name(rank) for rank in sorted(running))
        if due == "report":
            self.options.report(
                f"{names} is stopped (SIGSTOP), and all other ranks have ended: waiting for it "
                "('kill -CONT PID' lets it go on; KOLOVOD_LATE_FAILURE_S sets a limit)"
            )
        elif due == "failure":
            self._given_up = running
            self.supervisor.stop(signal.SIGKILL, self._standstill.why)

    def _name(self, rank: int) -> str:
        host = self._hosts[rank] if len(set(self._hosts)) > 1 else ""
        return rank_name(rank, host, self._group_of(rank).pids().get(rank, 0))


def _is_in_background() -> bool:
    """Return whether another process group has the terminal, and gets what is typed there."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # a terminal that is not this session's: nobody else's, either
        return False


def _now_text() -> str:
    """Return the time, for a line of output."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")

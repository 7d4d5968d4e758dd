"""A job: ranks on this host and on others, started together and seen through to the end.

The first rank that fails ends the job: SIGTERM to all of it, SIGKILL after a grace. ``ranks`` has
those of this host, ``remote`` those of another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

from kolovod import blame
from kolovod.config import load
from kolovod.errors import BootstrapError, InvalidArgumentError
from kolovod.launch.hosts import is_this_host
from kolovod.launch.local import GRACE_S, Ended, HostRanks, Order, signal_name
from kolovod.launch.output import Output
from kolovod.launch.remote import RemoteRanks, SshOptions, forwarded
from kolovod.launch.standstill import LOOK_S, Standstill
from kolovod.net.addresses import LOOPBACK, endpoint, own_addresses, split_addresses
from kolovod.net.channel import new_secret
from kolovod.rendezvous.external.launchers import asked_store
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Job", "JobOptions", "Outcome"]

_POLL_WITHOUT_PIDFD_S = 0.05
_LAST_WORDS_S = 0.5  # from a failure to SIGTERM: for the others to say what they have met


@dataclass(frozen=True)
class JobOptions:
    """What a job looks like from outside."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, over the launcher's own."""
    timestamps: bool = False
    output_dir: Path | None = None
    """Also write each rank's output, unmarked, to rank.N/stdout and rank.N/stderr below it."""
    keep_going: bool = False
    hosts: Sequence[str] = ()
    """The host of each rank, if not all the same."""
    ssh: SshOptions | None = None
    """How hosts other than this one are reached. None: ``hosts`` are but labels, all run here."""
    payload: bytes | None = None
    """What every rank is given in memory, with a file for its result (``HostRanks.start``)."""
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    """Where the ranks' output goes; None: nowhere."""
    report: Callable[[str], None] = lambda text: None
    """Called with each thing that the launcher itself has to say."""
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    """Starts the ranks of this host (``HostRanks``)."""


@dataclass
class Outcome:
    """How a job went."""

    ended: list[Ended] = field(default_factory=list)
    """In the order of their ends."""
    first_failure: Ended | None = None
    """The rank that failed first by itself: not told to end, nor because another one had failed."""
    stopped_by: int | None = None
    """The signal that the launcher was sent."""
    late: tuple[int, ...] = ()
    """Ranks that were still at work at the job's deadline."""

    def exit_code(self, keep_going: bool) -> int:
        """What the launcher should exit with."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.first_failure is None or (keep_going and any(e.code == 0 for e in self.ended)):
            return 0
        return self.first_failure.exit_code


class Job:
    """``size`` ranks. A context manager: leaving it leaves nothing behind."""

    def __init__(self, size: int, options: JobOptions) -> None:
        # First, since it may refuse what it finds: nothing is open yet.
        limits = load({**os.environ, **options.environment})
        self.size = size
        self.options = options
        self._hosts = list(options.hosts) or ["localhost"] * size
        self._secret = new_secret()
        consoles = {"stdout": options.stdout, "stderr": options.stderr}
        stamp = _now if options.timestamps else None
        self._output = Output(size, consoles, stamp, options.output_dir, options.report)
        self._here: HostRanks | None = None
        self._remote: dict[str, RemoteRanks] = {}
        self._store: RendezvousServer | None = None
        self._signals: list[int] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._kill_at: float | None = None
        self._failed: list[int] = []  # by themselves, in the order of their ends
        self._name_at: float | None = None  # at the latest
        self._stop_at: float | None = None
        self._standstill = Standstill(limits.late_report_s, limits.late_failure_s)
        self._looked_at = 0.0
        self._given_up: set[int] = set()
        self.outcome = Outcome()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the beginning ---

    def start(self, command: Callable[[int], Sequence[str]]) -> None:
        """Start every rank: ``command(rank)``.

        Raises BootstrapError, before any rank is started, if hosts cannot be reached: each with its
        reason.
        """
        far = [host for host in dict.fromkeys(self._hosts) if self._is_far(host)]
        if len(far) < len(set(self._hosts)):
            self._here = HostRanks(self._output.write, self.options.popen)
        for host in far:
            self._remote[host] = RemoteRanks(host, self.options.ssh or SshOptions(), self._write)
        if not self._connect():
            return
        store_addresses = self._open_store()
        for group in self._groups():
            ranks = [rank for rank in range(self.size) if self._group_of(rank) is group]
            orders = [self._order(rank, command(rank), store_addresses) for rank in ranks]
            group.start(orders, self.options.payload)

    def _is_far(self, host: str) -> bool:
        return self.options.ssh is not None and not is_this_host(host)

    def _write(self, rank: int, stream: str, data: bytes) -> None:
        """From another host: what it says of ranks that are not there is not trusted."""
        if 0 <= rank < self.size:
            self._output.write(rank, stream, data)

    def _connect(self) -> bool:
        """Reach all hosts at once; False if a signal came meanwhile."""
        results: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

        def reach(remote: RemoteRanks) -> None:
            try:
                remote.connect()
                results.put((remote.host, ""))
            except (BootstrapError, OSError) as error:
                results.put((remote.host, str(error)))

        for remote in self._remote.values():
            threading.Thread(target=reach, args=(remote,), daemon=True).start()
        reasons: dict[str, str] = {}
        while len(reasons) < len(self._remote):
            if self._signals:
                self._obey_signals()
                return False
            with contextlib.suppress(queue.Empty):
                host, reason = results.get(timeout=0.1)
                reasons[host] = reason
        failed = [(host, reasons[host]) for host in self._remote if reasons[host]]
        if failed:
            lines = "".join(f"\n  {host}: {reason}" for host, reason in failed)
            raise BootstrapError(
                f"{len(failed)} of {len(self._remote)} other hosts cannot be used, so nothing was "
                f"started:{lines}\n'ssh -o BatchMode=yes HOST true' must work from here without a "
                "question; --remote-python and --directory say where things are there"
            )
        return True

    def _open_store(self) -> dict[str, str]:
        """Start the rendezvous server; returns where each host finds it, "ip:port" or several.

        Behind NAT, or a firewall, users say where other hosts find it.
        """
        host, port = "", 0
        if not self._remote:
            self._store = RendezvousServer(self._secret, self.size)
        else:
            host, port = asked_store(os.environ)
            if host and not port:
                raise InvalidArgumentError(
                    f"KOLOVOD_STORE_HOST={host}, where other hosts reach this one, needs "
                    "KOLOVOD_STORE_PORT, a port that is open there; or unset it"
                )
            wanted = load({**os.environ, **self.options.environment}).interface_names
            # Where ssh came in, the way back is known to be open: those addresses first.
            seen = [remote.addresses[0] for remote in self._remote.values()]
            own = own_addresses(wanted)
            first = [address for address in own if address in seen and not wanted]
            addresses = list(dict.fromkeys([*first, *own]))
            self._store = RendezvousServer(self._secret, self.size, *addresses, port=port)
        if len(set(self._hosts)) > 1:
            self._store.host_of = self._hosts
        self._store.start()
        found = dict.fromkeys(self._hosts, self._store.address)
        if host:
            found.update(dict.fromkeys(self._remote, endpoint(host, port)))
        return found

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
        first = self._group_of(0)
        address = LOOPBACK
        if isinstance(first, RemoteRanks):
            address = first.addresses[1] or first.host
        elif self._remote:
            address = split_addresses(stores[host])[0][0]
        told = environment.torch_variables(first.torch_port, address)
        inherited = forwarded(os.environ) if host in self._remote else {}
        if inherited:
            inherited.setdefault("PYTHONUNBUFFERED", "1")
        own = self.options.environment
        return Order(rank, command, {**inherited, **own, **told, **own, **environment.variables()})

    # --- while it runs ---

    def pid(self, rank: int) -> int:
        """The process id of a rank, on its host."""
        return self._group_of(rank).pids().get(rank, 0)

    def signal(self, signum: int) -> None:
        """From a signal handler: pass ``signum`` on to the job and end it. Twice: kill it."""
        self._signals.append(signum)
        os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float | None = None) -> Outcome:
        """Wait until every rank has ended, or end them all after ``timeout_s``.

        On the deadline the ranks are sent SIGABRT first, so that those with faulthandler enabled
        print where they are.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running():
            self._sleep(deadline)
            for group in self._groups():
                self._note(group.collect())
            self._name_first()
            self._look_at_stopped()
            self._obey_signals()
            now = time.monotonic()
            if self._stop_at is not None and now >= self._stop_at and self._running():
                self._stop(signal.SIGTERM)
            if deadline is not None and now >= deadline and self._running():
                deadline = None
                self.outcome.late = tuple(sorted(self._running()))
                self._stop(signal.SIGABRT)
            if self._kill_at is not None and now >= self._kill_at and self._running():
                self._kill_at = now + 1.0
                self._send(signal.SIGKILL)
        return self.outcome

    def _sleep(self, deadline: float | None) -> None:
        """Until something may have happened."""
        poll = select.poll()
        groups = self._groups()
        for fd in (self._bell, *itertools.chain.from_iterable(group.fds() for group in groups)):
            poll.register(fd, select.POLLIN)
        moments = deadline, self._name_at, self._stop_at, self._kill_at
        times = [moment - time.monotonic() for moment in moments if moment is not None]
        if self.outcome.ended:
            times.append(LOOK_S)
        if any(group.needs_polling() for group in groups):
            times.append(_POLL_WITHOUT_PIDFD_S)
        poll.poll(max(0.0, min(times)) * 1000 + 1 if times else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def tail(self, rank: int, stream_name: str) -> str:
        """The last lines of a rank's "stdout" or "stderr"; after ``close``."""
        return self._output.tail(rank, stream_name)

    def close(self) -> None:
        """End whatever is left of the job, and release everything. Idempotent."""
        if self._bell < 0:
            return
        for remote in self._remote.values():
            remote.begin_close()
        for group in self._groups():
            group.close()
        self._output.close()
        if self._store is not None:
            self._store.close()
        os.close(self._bell)
        self._bell = -1

    def _groups(self) -> list[HostRanks | RemoteRanks]:
        here = [] if self._here is None else [self._here]
        return [*here, *self._remote.values()]

    def _group_of(self, rank: int) -> HostRanks | RemoteRanks:
        group = self._remote.get(self._hosts[rank], self._here)
        if group is None:
            raise AssertionError("the job was not started")
        return group

    def _running(self) -> set[int]:
        return {rank for group in self._groups() for rank in group.running}

    def _note(self, ended: Sequence[Ended]) -> None:
        several = len(set(self._hosts)) > 1
        for end in ended:
            if several and not end.host:
                end = replace(end, host=self._hosts[end.rank])
            if end.rank in self._given_up:
                end = replace(end, given_up=self._standstill.why)
            self.outcome.ended.append(end)
            if self._store is not None:
                self._store.mark_dead(end.rank, end.cause)
            first = self.outcome.first_failure
            if end.lost and first is not None and end.time < first.time:
                self.outcome.first_failure = end  # silent before the others failed: their cause
                self.options.report(f"{end.name} {end.cause}")
            elif end.rank in self._given_up or (end.code != 0 and self._kill_at is None):
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
        running = self._running()
        first, may_tell_more = blame.first_cause(self._failed[0], blames, running, well)
        if self.options.keep_going:
            self.outcome.first_failure = ends[first]
            return
        now = time.monotonic()
        self._name_at = self._name_at or now + GRACE_S
        if may_tell_more and now < self._name_at:
            return
        self._name_at, self._stop_at = None, now + _LAST_WORDS_S
        self.outcome.first_failure = ends[first]
        left = f"; ending the other {len(running)}" if running else ""
        self.options.report(f"{ends[first].name} {ends[first].cause}{left}")

    def _look_at_stopped(self) -> None:
        """Ranks that are stopped, and nobody is left to wait for them."""
        now = time.monotonic()
        if not self.outcome.ended or self._kill_at is not None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        stopped = {rank for group in self._groups() for rank in group.stopped()}
        running = self._running()
        due = self._standstill.look(now, running, stopped)
        names = ", ".join(self._name(rank) for rank in sorted(running))
        if due == "report":
            self.options.report(
                f"{names} is stopped (SIGSTOP), and all other ranks have ended: waiting for it "
                "('kill -CONT PID' lets it go on; KOLOVOD_LATE_FAILURE_S sets a limit)"
            )
        elif due == "failure":
            self._given_up = running
            self._stop(signal.SIGKILL)

    def _name(self, rank: int) -> str:
        host = self._hosts[rank] if len(set(self._hosts)) > 1 else ""
        return Ended(rank, self.pid(rank), 0, host).name

    def _obey_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            name = signal_name(signum)
            count = len(self._running())
            if self.outcome.stopped_by is None:
                self.outcome.stopped_by = signum
                self.options.report(f"{name}: ending {count} ranks (again: kill them)")
                self._stop(signum)
            else:
                self.options.report(f"{name} again: killing {count} ranks")
                self._stop(signal.SIGKILL)

    def _stop(self, signum: int) -> None:
        self._stop_at = None
        self._send(signum)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S

    def _send(self, signum: int) -> None:
        for group in self._groups():
            group.send(signum)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")

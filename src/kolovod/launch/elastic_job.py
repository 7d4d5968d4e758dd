"""An elastic job: processes that may end, come and leave while the others go on.

The launcher is its steward (elastic/steward.py). It starts a process for each slot, tells the
steward which have ended, and starts others in their place as long as hosts.plan_starts says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kolovod.elastic import record_file
from kolovod.elastic.ballots import NOTHING, Proof, World
from kolovod.elastic.hosts import RetryPolicy, Start, plan_starts
from kolovod.elastic.membership import Policy
from kolovod.elastic.steward import Steward
from kolovod.elastic.table import FIRST_LAUNCHER, Table, first_world
from kolovod.errors import BootstrapError
from kolovod.launch.avoided_hosts import AvoidedHosts, Process
from kolovod.launch.discovery import PERIOD_S, Discovery
from kolovod.launch.fleet import Fleet, Meeting
from kolovod.launch.job import JobOptions, now_text
from kolovod.launch.local import GRACE_S, Ended, signal_name
from kolovod.launch.output import Output
from kolovod.net.addresses import LOOPBACK, address_of, endpoint, listen
from kolovod.net.channel import new_secret
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["ElasticJob", "ElasticOptions"]

_POLL_WITHOUT_PIDFD_S = 0.05
_FINISHED_GRACE_S = 1.0
"""For the others to end as well, when one process has ended well."""


@dataclass(frozen=True)
class ElasticOptions:
    """What makes a job elastic."""

    np: int
    """Processes at the beginning."""
    min_np: int = 1
    max_np: int = 1 << 10
    places: Mapping[str, int] = field(default_factory=dict)
    """Processes that each host may have, in the order of preference."""
    discover: Callable[[], Mapping[str, int]] | None = None
    """Says that instead, as often as it is asked. Raises as ``discovery.ask_script``."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    elastic_timeout_s: float = 600.0
    reset_limit: int | None = None
    ends_for_growth: bool = False
    """See ``membership.Policy``."""
    gather_started_s: float = 0.0
    """See ``membership.Policy``."""
    begins_with_all: bool = False
    """Whether the job begins with as many processes as there are places, up to ``max_np``."""


class ElasticJob:
    """A context manager: leaving it leaves nothing behind."""

    def __init__(self, elastic: ElasticOptions, options: JobOptions) -> None:
        self._elastic = elastic
        self._options = options
        self._secret = new_secret()
        consoles = {"stdout": options.stdout, "stderr": options.stderr}
        stamp = now_text if options.timestamps else None
        self._places: Mapping[str, int] = dict(elastic.places)
        self._discovery: Discovery | None = None
        if elastic.discover is not None:
            self._discovery = Discovery(elastic.discover, self._discovered, options.report)
        most = elastic.max_np
        self._output = Output(most, consoles, stamp, options.output_dir, options.report)
        self._fleet = Fleet(options.ssh, self._write, options.popen)
        self._command: Sequence[str] = ()
        self._rendezvous: RendezvousServer | None = None
        self._steward: Steward | None = None
        self._meeting: Meeting | None = None
        self._own = ("", "")  # where rendezvous and steward listen
        self._found: dict[str, tuple[str, str]] = {}  # by host: where they are seen from there
        self._processes: dict[int, Process] = {}
        self._avoided = AvoidedHosts(elastic.retry, self._fleet, options.report)
        self._failed: list[Ended] = []
        self._ends: dict[int, Ended] = {}  # of members, by number
        self._left: dict[int, str] = {}  # by slot, the hosts of those that wanted to leave
        self._proofs: list[tuple[float, Proof]] = []  # of those that have ended well, and when due
        self._ended_well = False
        self._signals: list[int] = []
        self._given_up: list[Proof] = []  # by themselves; their processes may still run
        self._stop_reason = ""
        self._stopped_by: int | None = None
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # of what the steward's thread tells

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the beginning ---

    def start(self, command: Sequence[str]) -> None:
        """Start the processes that the job begins with. Raises BootstrapError, as ``Job`` does."""
        self._command = command
        if self._elastic.discover is not None and not self._wait_for_places(self._elastic.discover):
            return
        if not self._fleet.connect(list(self._places), lambda: bool(self._signals)):
            return
        now = time.monotonic()
        count = self._elastic.max_np if self._elastic.begins_with_all else self._elastic.np
        plan = plan_starts(self._places, {}, (), count, self._elastic.retry, now)
        if len(plan.starts) < self._elastic.min_np:
            raise BootstrapError(
                f"{self._elastic.min_np} processes are to start, but the hosts have places for "
                f"{len(plan.starts)}"
            )
        first_hosts = tuple(start.host for start in plan.starts)
        self._serve(first_hosts)
        self._start(plan.starts, first_hosts, self._places)
        if self._discovery is not None:
            self._discovery.start(self._places)

    def _wait_for_places(self, discover: Callable[[], Mapping[str, int]]) -> bool:
        """Ask until there are places for the processes that the job begins with.

        After ``elastic_timeout_s`` as many as ``min_np`` are enough. False: a signal came.
        """
        deadline = time.monotonic() + self._elastic.elastic_timeout_s
        while not self._signals:
            try:
                self._places = dict(discover())
            except BootstrapError as error:
                self._options.report(str(error))
            count = sum(self._places.values())
            if count >= self._elastic.np:
                return True
            if time.monotonic() >= deadline:
                return True
            time.sleep(PERIOD_S)
        return False

    def _discovered(self, places: Mapping[str, int]) -> bool:
        """On the discovery's thread: the hosts have changed. False: some cannot be reached yet."""
        new = [host for host in places if host not in self._found]
        usable = dict(places)
        try:
            self._fleet.connect(new, lambda: bool(self._signals))
        except BootstrapError as error:
            self._options.report(str(error))
        for host in new:
            if self._fleet.is_far(host) and host not in self._fleet.remote:
                del usable[host]
            else:
                self._find(host)
        if usable == self._places:
            return usable == places
        self._places = usable
        listed = ", ".join(f"{host}:{count}" for host, count in usable.items())
        self._options.report(f"the hosts are now {listed or 'none'}")
        self._ring()
        return usable == places

    def _serve(self, first_hosts: Sequence[str]) -> None:
        comes = self._discovery is not None and self._options.ssh is not None
        meeting = Meeting(self._fleet, self._options.environment, more_may_come=comes)
        self._meeting = meeting
        addresses = meeting.addresses
        rendezvous = RendezvousServer(self._secret, len(first_hosts), *addresses, port=meeting.port)
        self._rendezvous = rendezvous
        # Users who say where other hosts reach this one have opened the next port as well.
        port = meeting.port and meeting.port + 1
        listeners = listen(addresses or [LOOPBACK], backlog=128, port=port)
        policy = Policy(
            min_np=self._elastic.min_np,
            max_np=self._elastic.max_np,
            elastic_timeout_s=self._elastic.elastic_timeout_s,
            reset_limit=self._elastic.reset_limit,
            ends_for_growth=self._elastic.ends_for_growth,
            gather_started_s=self._elastic.gather_started_s,
        )
        self._steward = Steward(
            FIRST_LAUNCHER,
            Table(first_world(enumerate(first_hosts))),
            policy,
            self._secret,
            listeners,
            formed=self._formed,
            stopped=self._stopped,
            resigned=self._resigned,
        )
        self._own = rendezvous.address, ",".join(map(address_of, listeners))
        for host in self._places:
            self._find(host)
        rendezvous.start()
        self._steward.start()

    def _find(self, host: str) -> None:
        """Note where processes on ``host`` find the rendezvous and the steward."""
        meeting = self._meeting
        assert meeting is not None
        rendezvous, steward = self._own
        if meeting.host and host in self._fleet.remote:
            rendezvous = endpoint(meeting.host, meeting.port)
            steward = endpoint(meeting.host, meeting.port + 1)
        self._found[host] = rendezvous, steward

    def _start(
        self, starts: Sequence[Start], first_hosts: tuple[str, ...], places: Mapping[str, int]
    ) -> None:
        assert self._steward is not None
        for start in starts:
            number = len(self._processes)
            self._processes[number] = Process(
                start.slot,
                start.host,
                time.monotonic(),
                self._steward.number_in(start.slot),
                bool(first_hosts),
            )
            self._steward.expect(start.slot, comes=True)
            order = self._fleet.order(
                number,
                self._command,
                self._environment(start, first_hosts),
                self._options.environment,
                self._fleet.torch_server(start.host, self._found[start.host][0]),
                beside=places[start.host],
            )
            self._fleet.group(start.host).start([order], self._options.payload)

    def _environment(self, start: Start, first_hosts: tuple[str, ...]) -> RankEnvironment:
        """``rank`` and ``size`` are those of a world; a process that comes later is alone first."""
        rendezvous, steward = self._found[start.host]
        numbers = (0, 1, 0, 1, 0, 1)
        if first_hosts:
            where = local_and_cross(first_hosts, start.slot)
            numbers = (start.slot, len(first_hosts), *where)
        return RankEnvironment(
            *numbers,
            host=start.host,
            rendezvous=rendezvous,
            secret=self._secret,
            steward=steward,
            slot=start.slot,
            first_hosts=first_hosts,
            min_np=self._elastic.min_np,
        )

    # --- while it runs ---

    def signal(self, signum: int) -> None:
        """From a signal handler: end the job. Twice: kill it."""
        self._signals.append(signum)
        self._ring()

    def pid(self, slot: int) -> int:
        """Of the process that fills ``slot``, on its host; 0: there is none."""
        for number in self._fleet.running:
            process = self._processes[number]
            if process.slot == slot:
                return self._fleet.group(process.host).pids().get(number, 0)
        return 0

    def wait(self) -> int:
        """Wait until all processes have ended; returns the exit code."""
        while self._fleet.running:
            until_s = self._plan()
            self._sleep(until_s)
            for end in self._fleet.collect():
                self._note(end)
            self._avoided.kill_late(self._processes)
            self._obey_signals()
            with self._lock:
                reason = self._stop_reason
            now = time.monotonic()
            if reason and self._stop_at is None:
                if not self._ended_well:  # else nobody is left who could use another world
                    self._options.report(f"ending the job: {reason}")
                self._stop_at = now + GRACE_S  # for those who want to write a checkpoint
            if self._stop_at is not None and now >= self._stop_at and self._kill_at is None:
                self._stop(signal.SIGTERM)
            if self._kill_at is not None and now >= self._kill_at and self._fleet.running:
                self._kill_at = now + 1.0
                self._fleet.send(signal.SIGKILL)
        return self._exit_code()

    @property
    def stop_reason(self) -> str:
        """Why the steward has ended the job; "" if it has not."""
        with self._lock:
            return "" if self._ended_well else self._stop_reason

    @property
    def failed(self) -> list[Ended]:
        """The processes that have failed, in that order."""
        return list(self._failed)

    def results(self) -> list[bytes]:
        """What each member of the last world has left, by rank (``JobOptions.payload``)."""
        assert self._steward is not None
        ends = (self._ends.get(member.number) for member in self._steward.world.members)
        return [b"" if end is None else end.result for end in ends]

    def _exit_code(self) -> int:
        """0 if no member of the last world has failed, and one has come to its end."""
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        numbers = set() if self._steward is None else self._steward.world.numbers
        last = [end for number, end in self._ends.items() if number in numbers and end.code != 0]
        failed = last or ([] if self._ended_well else self._failed)
        if failed:
            return failed[0].exit_code
        return 0 if self._ended_well else 128 + signal.SIGTERM  # all have left

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        if self._bell < 0:
            return
        if self._discovery is not None:
            self._discovery.close()
        self._fleet.close()
        self._output.close()
        for server in (self._steward, self._rendezvous):
            if server is not None:
                server.close()
        os.close(self._bell)
        self._bell = -1

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _write(self, number: int, stream: str, data: bytes) -> None:
        process = self._processes.get(number)
        if process is not None and data:  # the end of a stream is not that of the slot's
            self._output.write(process.slot, stream, data)

    def _plan(self) -> float | None:
        """Start what is missing; returns when to look again."""
        assert self._steward is not None
        if self._ended_well or self._kill_at is not None:
            return None
        places = self._places  # which another thread replaces
        taken = self._left.copy()  # nobody is to come after those
        taken |= {self._processes[n].slot: self._processes[n].host for n in self._fleet.running}
        now = time.monotonic()
        plan = plan_starts(
            places,
            taken,
            self._avoided.failures,
            self._elastic.max_np,
            self._elastic.retry,
            now,
        )
        self._steward.set_hosts(plan.cooling, plan.unwanted | plan.ended)
        for running in map(self._processes.__getitem__, self._fleet.running):
            if running.host in plan.unwanted or running.slot in plan.crowded:
                running.sent_away = True
        self._avoided.end(plan.ended, self._processes)
        crowded = (self._steward.number_in(slot) for slot in plan.crowded)
        self._steward.leave([number for number in crowded if number is not None])
        if plan.starts and self._fleet.running:
            for start in plan.starts:
                self._options.report(start.reason)
            self._start(plan.starts, (), places)
        return plan.until_s

    def _sleep(self, until_s: float | None) -> None:
        poll = select.poll()
        for fd in (self._bell, *self._fleet.fds()):
            poll.register(fd, select.POLLIN)
        stop_at = self._stop_at if self._kill_at is None else None
        moments = [until_s, stop_at, self._kill_at, *(due_s for due_s, _ in self._proofs)]
        moments += self._avoided.kill_times(self._processes)
        times = [moment - time.monotonic() for moment in moments if moment is not None]
        if self._fleet.needs_polling():
            times.append(_POLL_WITHOUT_PIDFD_S)
        poll.poll(max(0.0, min(times)) * 1000 + 1 if times else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        now = time.monotonic()
        with self._lock:
            given_up, self._given_up = self._given_up, []
        for proof in given_up:
            self._note_resigned(proof)
        for due_s, proof in list(self._proofs):
            if due_s <= now:
                self._proofs.remove((due_s, proof))
                self._prove(proof)

    def _note(self, end: Ended) -> None:
        """A process has ended."""
        assert self._steward is not None
        process = self._processes[end.rank]
        number = self._number_of(process)
        self._steward.expect(process.slot, comes=False)
        if process.is_told:
            pass  # whatever its code
        elif end.code == 0 and not end.lost:
            if number is not None and number in self._steward.world.numbers:
                self._ended_well = True  # it has come to its end, and so will the others
            elif not process.sent_away:
                self._left[process.slot] = process.host
        elif self._kill_at is None:
            name = self._name(process, number, end)
            others = "; the others go on" if self._fleet.running else ""
            self._options.report(f"{name} {end.cause}{others}")
            self._failed.append(end)
            self._note_failure(process)
        if number is not None and not process.is_told:
            self._ends[number] = end
        if number is None or end.lost:  # of a host that is silent nobody knows what it does
            return
        proof = Proof(number, end.cause, record_file.parse(end.record) or NOTHING)
        if end.code == 0:
            self._proofs.append((time.monotonic() + _FINISHED_GRACE_S, proof))
        else:
            self._prove(proof)

    def _number_of(self, process: Process) -> int | None:
        """The member that it is; None: it has not become one."""
        assert self._steward is not None
        if process.begins:
            return process.slot
        number = self._steward.number_in(process.slot)
        return None if number == process.before else number

    def _note_failure(self, process: Process) -> None:
        """Before it is proven, so that the next world has nobody of a host that is avoided."""
        assert self._steward is not None
        if self._avoided.note(process) and self._elastic.retry.whole_host:
            self._steward.avoid(process.host)

    def _resigned(self, proof: Proof) -> None:
        """On the steward's thread: a member is about to fail."""
        self._mark_dead(proof)
        if self._elastic.retry.whole_host:
            assert self._steward is not None
            for member in self._steward.world.members:
                if member.number == proof.number:
                    self._steward.avoid(member.host)
            with self._lock:
                self._given_up.append(proof)
            self._ring()

    def _note_resigned(self, proof: Proof) -> None:
        for number in self._fleet.running:
            process = self._processes[number]
            if self._number_of(process) == proof.number and not process.has_resigned:
                process.has_resigned = True
                self._note_failure(process)

    def _prove(self, proof: Proof) -> None:
        assert self._steward is not None
        assert self._rendezvous is not None
        self._steward.prove(proof)
        self._mark_dead(proof)

    def _mark_dead(self, proof: Proof) -> None:
        """Those who form the present world shall not wait for it."""
        assert self._steward is not None
        assert self._rendezvous is not None
        world = self._steward.world
        for rank, member in enumerate(world.members):
            if member.number == proof.number:
                self._rendezvous.mark_dead(rank, proof.cause, world.epoch)

    def _name(self, process: Process, number: int | None, end: Ended) -> str:
        assert self._steward is not None
        world = self._steward.world
        where = f"on host {process.host} (pid {end.pid})"
        for rank, member in enumerate(world.members):
            if member.number == number:
                return f"rank {rank} {where}"
        return f"the process in slot {process.slot} {where}"

    def _formed(self, world: World, reason: str) -> None:
        """On the steward's thread."""
        self._options.report(
            f"epoch {world.epoch}: {len(world.members)} ranks go on, since {reason}"
        )

    def _stopped(self, reason: str) -> None:
        """On the steward's thread."""
        with self._lock:
            self._stop_reason = reason
        self._ring()

    def _obey_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            count = len(self._fleet.running)
            if self._stopped_by is None:
                self._stopped_by = signum
                self._options.report(
                    f"{signal_name(signum)}: ending {count} ranks (again: kill them)"
                )
                self._stop(signum)
            else:
                self._options.report(f"{signal_name(signum)} again: killing {count} ranks")
                self._stop(signal.SIGKILL)

    def _stop(self, signum: int) -> None:
        self._fleet.send(signum)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + GRACE_S

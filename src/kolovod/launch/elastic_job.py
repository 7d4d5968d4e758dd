"""An elastic job: processes that may end, come and leave while the others go on.

The launcher is its coordinator (coordination/coordinator.py). It starts a process for each slot,
tells the coordinator which have ended, and starts others in their place as long as
hosts.plan_starts says so: this is its policy in the supervisor's loop.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kolovod.config import load
from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, Proof, World
from kolovod.coordination.coordinator import Coordinator
from kolovod.coordination.hosts import Start, plan_starts
from kolovod.coordination.leaving import LEAVING
from kolovod.errors import BootstrapError, HostError
from kolovod.launch import takeover
from kolovod.launch.avoided_hosts import AvoidedHosts, Process
from kolovod.launch.discovery import PERIOD_S, Discovery
from kolovod.launch.elastic_options import ElasticOptions, late_failure_of
from kolovod.launch.elastic_services import ElasticServices
from kolovod.launch.hung_processes import HungProcesses
from kolovod.launch.job import JobOptions
from kolovod.launch.local import GRACE_S, Ended
from kolovod.launch.lost_hosts import LostHosts
from kolovod.launch.outcome import How, Outcome
from kolovod.launch.saved_state import Persistence, SavedState
from kolovod.launch.supervisor import Phase, Policy, Supervisor

__all__ = ["ElasticJob"]

_LEAVE_S = 30.0
"""For ranks that are told to leave to write a checkpoint: what Slurm and Kubernetes give by
default. A second signal kills them at once."""
_LOOK_S = 1.0
"""Between two looks at processes that share a slot."""


class ElasticJob(Policy):
    """A context manager: leaving it leaves nothing behind."""

    def __init__(
        self, elastic: ElasticOptions, options: JobOptions, persistence: Persistence | None = None
    ) -> None:
        """``persistence``: how it outlives this process; None: it does not."""
        self._persistence = persistence
        self._edition = 0  # of what the next launcher is to know
        environment = {**late_failure_of(options.environment), **options.environment}
        late_failure_s = load({**os.environ, **environment}).late_failure_s
        self._elastic = elastic = replace(elastic, hang_s=late_failure_s)
        self._options = options = replace(options, environment=environment)
        self._places: Mapping[str, int] = dict(elastic.places)
        self._planned: Mapping[str, int] = {}
        """For which all that can be is started."""
        self._discovery: Discovery | None = None
        if elastic.discover is not None:
            self._discovery = Discovery(elastic.discover, self._discovered, options.report)
        self._output = options.make_output(0, most=elastic.max_np)
        self._fleet = options.make_fleet(self._write, persistence)
        self.supervisor = Supervisor(self, self._fleet, self._output, options.note)
        self._command: Sequence[str] = ()
        self._services: ElasticServices | None = None
        self._processes: dict[int, Process] = {}
        self._lost_hosts = LostHosts(self._fleet, self.supervisor.ring)
        self._are_known = threading.Event()  # those of an earlier launcher
        if persistence is None or not persistence.goes_on:
            self._are_known.set()
        self._avoided = AvoidedHosts(elastic.retry, self.supervisor, options.report)
        self.outcome = Outcome(lambda: self._coordinator)
        self._resigned_members: set[int] = set()  # that are not noted yet
        self._hung = HungProcesses(self._fleet, elastic.hang_s)
        self._stop_reason = ""
        self._is_ending = False  # since the coordinator has said so
        self._lock = threading.Lock()  # of what the coordinator's thread tells

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._lost_hosts.close()
        if self._discovery is not None:
            self._discovery.close()
        self.supervisor.close()

    # --- the beginning ---

    def start(self, command: Sequence[str]) -> None:
        """Start the processes that the job begins with, or go on with those that there are.

        Raises BootstrapError, as ``Job`` does.
        """
        self._command = command
        before = None
        if self._persistence is not None:
            before = takeover.find(
                self._fleet,
                self._persistence,
                self._options.report,
                self._found,
                self.supervisor.is_told_to_end,
            )
        if before is not None:
            first_hosts = before.first_hosts
        elif self._find_hosts():
            count = self._elastic.max_np if self._elastic.begins_with_all else self._elastic.np
            plan = plan_starts(
                self._places,
                {},
                (),
                count,
                self._elastic.retry,
                time.monotonic(),
                replica_size=self._elastic.replica_size,
            )
            if len(plan.starts) < self._elastic.min_np:
                raise HostError(
                    f"{self._elastic.min_np} processes are to start, but the hosts have places for "
                    f"{len(plan.starts)}"
                )
            first_hosts = [start.host for start in plan.starts]
        else:
            return
        self._services = ElasticServices(
            self._elastic,
            self._fleet,
            first_hosts,
            self._options.environment,
            more_may_come=self._discovery is not None and self._options.ssh is not None,
            before=before,
            formed=self._formed,
            stopped=self._stopped,
            resigned=self._resigned,
            hangs=self._hangs,
        )
        self.supervisor.lasting.callback(self._services.close)
        self._services.find(self._places)
        self._services.start()
        if before is None:
            self._start(plan.starts, True, self._places)
        else:
            self._keep()
        if self._discovery is not None:
            self._discovery.start(self._places)
        if self._persistence is not None:
            self._lost_hosts.start()
        self.supervisor.advance(Phase.RUNNING)

    def _find_hosts(self) -> bool:
        """Reach the hosts that the job begins on. False: a signal came."""
        if self._elastic.discover is not None and not self._wait_for_places(self._elastic.discover):
            return False
        return self._fleet.connect(list(self._places), self.supervisor.is_told_to_end)

    def _found(self, before: SavedState, processes: dict[int, Process]) -> None:
        """Take over what an earlier launcher has left."""
        self._places = before.places
        self.outcome.go_on(before.ended_well, dict(before.left))
        for process in processes.values():
            self._output.add(process.slot)
        self._processes = processes
        self._are_known.set()

    def _keep(self) -> None:
        """Let the next launcher know what there is, before it is."""
        if self._persistence is not None:
            self._edition += 1
            for number, process in self._processes.items():
                process.member = self._number_of(number)
            takeover.leave(
                self._fleet,
                self._persistence,
                self._serving,
                self._places,
                self._processes,
                edition=self._edition,
                ended_well=self.outcome.ended_well,
                left=self.outcome.left,
            )

    def _wait_for_places(self, discover: Callable[[], Mapping[str, int]]) -> bool:
        """Ask until there are places for the processes that the job begins with.

        After ``elastic_timeout_s`` as many as ``min_np`` are enough. False: a signal came.
        """
        deadline = time.monotonic() + self._elastic.elastic_timeout_s
        while not self.supervisor.is_told_to_end():
            try:
                self._places = dict(discover())
            except BootstrapError as error:
                self._options.report(str(error))
            count = sum(self._places.values())
            if count >= self._elastic.np or time.monotonic() >= deadline:
                return True
            time.sleep(PERIOD_S)
        return False

    def _discovered(self, places: Mapping[str, int]) -> bool:
        """Take the hosts' change, on the discovery's thread. False: some cannot be reached yet."""
        services = self._serving
        new = [host for host in places if not services.is_found_from(host)]
        usable = dict(places)
        try:
            self._fleet.connect(new, self.supervisor.is_told_to_end)
        except BootstrapError as error:
            self._options.report(str(error))
        for host in new:
            if self._fleet.is_reached(host):
                services.find([host])
            else:
                del usable[host]
        if usable == self._places:
            return usable == places
        self._places = usable
        listed = ", ".join(f"{host}:{count}" for host, count in usable.items())
        self._options.note(f"the hosts are now {listed or 'none'}")
        self.supervisor.ring()
        return usable == places

    @property
    def _serving(self) -> ElasticServices:
        assert self._services is not None
        return self._services

    @property
    def _coordinator(self) -> Coordinator:
        return self._serving.coordinator

    def _start(
        self,
        starts: Sequence[Start],
        are_first: bool,
        places: Mapping[str, int],
        *,
        is_news: bool = False,
    ) -> None:
        services = self._serving
        numbers = range(len(self._processes), len(self._processes) + len(starts))
        for number, start in zip(numbers, starts, strict=True):
            self._output.add(start.slot)
            now = time.monotonic()
            local_rank = self._free_local_rank(start.host, numbers)
            member = start.slot if are_first else None
            self._processes[number] = Process(start.slot, start.host, now, member, local_rank)
        self._keep()
        for number, start in zip(numbers, starts, strict=True):
            self._coordinator.expect(start.slot, comes=True, is_news=is_news)
            order = self._fleet.order(
                number,
                self._command,
                services.environment(start, are_first, number, self._processes[number].local_rank),
                self._options.environment,
                services.torch_server(start.host),
                beside=places[start.host],
            )
            self._fleet.group(start.host).start([order], self._options.payload)

    def _free_local_rank(self, host: str, starting: range) -> int:
        """Return the lowest local rank that no process on ``host`` has.

        Those with the numbers ``starting`` count, too.
        """
        there = [self._processes.get(number) for number in (*self._fleet.running, *starting)]
        taken = {p.local_rank for p in there if p is not None and p.host == host}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    # --- while it runs ---

    def world_size(self) -> int:
        """Implement ``Policy.world_size``: before there is a world, that of the first one."""
        members = 0 if self._services is None else len(self._coordinator.world.members)
        return members or self._elastic.np

    def wait(self) -> int:
        """Wait until all processes have ended; returns the exit code."""
        self._planned = self._places
        self.supervisor.run()
        return self._exit_code()

    def look(self) -> Sequence[float | None]:
        """Implement ``Policy.look``."""
        self._note_reached()
        places = self._places  # before the ends: where a place is gone, so is who was there
        ends = self._fleet.collect()
        self._note_resigned()  # after it: who had resigned before its end has done so for all
        for end in ends:
            self._note(end)
        is_known = all(self._processes[n].member == self._number_of(n) for n in self._fleet.running)
        if self.outcome.has_left_unseen() or not is_known:
            self._keep()
        self._hung.kill(self._number_of)
        self._hung.kill_left_behind(self._processes, self._is_left_behind)
        with self._lock:
            reason = self._stop_reason
        if reason and not self._is_ending:
            self._is_ending = True
            if not self.outcome.ended_well:  # else nobody is left who could use another world
                self._options.report(f"ending the job: {reason}")
            self.supervisor.advance(Phase.LAST_WORDS, GRACE_S)  # to write a checkpoint
        if self.supervisor.is_due(Phase.LAST_WORDS):
            self.supervisor.stop(signal.SIGTERM, f"the job has ended: {reason}")
            self._tell_who_is_waited_for()
        until_s = self._plan(places) if self.supervisor.goes_on() else None
        return until_s, *self._hung.kill_times()

    def _tell_who_is_waited_for(self) -> None:
        running = sorted(self._fleet.running)
        resigned = [self._processes[n] for n in running if self._processes[n].has_resigned]
        if resigned:
            names = ", ".join(f"slot {process.slot} on host {process.host}" for process in resigned)
            self._options.report(f"waiting for what is left to end after an exception: {names}")

    def to_end(self) -> set[int] | None:
        """Implement ``Policy.to_end``: who has resigned is left to finish, unless by the user."""
        running = self._fleet.running
        left = {number for number in running if not self._processes[number].has_resigned}
        return None if left == running or self.supervisor.stopped_by is not None else left

    def may_hear_of_more(self) -> bool:
        """Implement ``Policy.may_hear_of_more``: of ranks on lost hosts, which may go on there."""
        if self._persistence is None or self.outcome.ended_well or self.supervisor.is_stopping:
            return False
        with self._lock:
            return not self._stop_reason and bool(self._fleet.lost())

    def _note_reached(self) -> None:
        """Note hosts that had been lost and are reached again: what runs there has not ended."""
        for host in self._lost_hosts.reached():
            back = self._fleet.group(host).running
            self._options.note(
                f"host {host} is reached again, with {len(back)} processes of this job"
            )
            members = map(self._number_of, back)
            self.outcome.take_back(back, [number for number in members if number is not None])
            self._keep()  # its agent may be a new one

    @property
    def stop_reason(self) -> str:
        """Why the coordinator has ended the job; "" if it has not."""
        is_well = self.outcome.ended_well or self._exit_code() == 0
        with self._lock:
            return "" if is_well else self._stop_reason

    def tail(self, end: Ended, stream_name: str) -> str:
        """The last lines that the slot of a process has written to "stdout" or "stderr"."""
        return self._output.tail(self._processes[end.rank].slot, stream_name)

    def _exit_code(self) -> int:
        if self.supervisor.stopped_by is not None:
            return 128 + self.supervisor.stopped_by
        return self.outcome.exit_code(None if self._services is None else self._coordinator.world)

    def leave_alone(self) -> None:
        """Let agents and processes go on without this launcher."""
        self._are_known.set()
        self._fleet.leave_alone()

    def _write(self, number: int, stream: str, data: bytes) -> None:
        self._are_known.wait()
        process = self._processes.get(number)
        if process is not None and data:  # the end of a stream is not that of the slot's
            self._output.write(process.slot, stream, data)

    def _plan(self, places: Mapping[str, int]) -> float | None:
        """Start what is missing on the hosts ``places``; returns when to look again."""
        is_ending = self.supervisor.phase > Phase.RUNNING or self.supervisor.is_told_to_end()
        if self.outcome.ended_well or is_ending:
            return None
        # Horovod's ranks hear of hosts that were found, and stop until their processes are there.
        is_news = self._elastic.retry.whole_host and places != self._planned
        self._planned = places
        taken = self.outcome.left.copy()  # nobody is to come after those
        running = [self._processes[number] for number in sorted(self._fleet.running)]
        announced = {process.host for process in running if self._makes_avoided(process)}
        taken |= {process.slot: process.host for process in running}
        twice = Counter((process.slot, process.host) for process in running)
        twice -= Counter(taken.items())
        now = time.monotonic()
        plan = plan_starts(
            places,
            taken,
            self._avoided.failures,
            self._elastic.max_np,
            self._elastic.retry,
            now,
            lost=self._fleet.lost(),
            twice=[host for _, host in twice.elements()],
            ordered=self._ordered(),
            replica_size=self._elastic.replica_size,
        )
        unwanted = plan.unwanted | plan.ended | announced
        self._coordinator.set_hosts(plan.cooling.keys() | announced, unwanted)
        for process in running:
            if process.host in plan.unwanted or process.slot in plan.crowded:
                process.sent_away = True
        self._avoided.end(plan.ended, self._processes)
        crowded = [n for n in self._fleet.running if self._processes[n].slot in plan.crowded]
        members = map(self._number_of, crowded)
        self._coordinator.leave([number for number in members if number is not None])
        if plan.starts and self._fleet.running:
            for start in plan.starts:
                self._options.note(start.reason)
            self._start(plan.starts, False, places, is_news=is_news)
        if not twice:
            return plan.until_s
        self._end_superfluous()
        look_s = now + _LOOK_S
        return look_s if plan.until_s is None else min(look_s, plan.until_s)

    def _ordered(self) -> set[int]:
        """The slots whose process has been ordered, but has not begun yet."""
        processes = {number: self._processes[number] for number in self._fleet.running}
        hosts = {process.host for process in processes.values()}
        pids = {host: self._fleet.group(host).pids() for host in hosts}
        return {p.slot for number, p in processes.items() if not pids[p.host].get(number)}

    def _end_superfluous(self) -> None:
        """End processes whose slots were filled elsewhere.

        Their host was lost, and then reached again, and they live.
        """
        for number in self._fleet.running:
            process, member = self._processes[number], self._number_of(number)
            if (
                not process.is_told
                and member is not None
                and self._coordinator.is_in_the_way(member)
            ):
                process.is_told = True
                name = f"slot {process.slot} lives elsewhere: its process on host {process.host}"
                self._options.note(f"{name} (number {number}) ends")
                self._fleet.send(signal.SIGTERM, "its slot is filled elsewhere", {number})

    def _note(self, end: Ended) -> None:
        """A process has ended."""
        process = self._processes[end.rank]
        number = self._number_of(end.rank)
        self._coordinator.expect(process.slot, comes=False)
        how = self.outcome.note(process, number, end)
        is_told = self.supervisor.stopped_by is not None or not process.has_resigned
        if how is How.FAILED and not (self.supervisor.is_stopping and is_told):
            name = self.outcome.note_failed(process, number, end)
            others = "; the others go on" if self._fleet.running else ""
            self._options.report(f"{name} {end.cause}{others}")
            was_cut_off = bool(end.lost) or self.outcome.was_cut_off(number)
            self._note_failure(process, was_cut_off=was_cut_off)
            self._end_replica(end)
        elif how in (How.AT_ITS_END, How.LEFT):
            self._keep()
        if number is None or end.lost:  # of a host that is silent nobody knows what it does
            return
        record = None if end.record is None else record_file.parse(end.record) or NOTHING
        self._coordinator.prove(Proof(number, end.cause, record, has_finished=end.code == 0))

    def _end_replica(self, end: Ended) -> None:
        """End the others of a replica: they cannot go on without the process that has ended.

        Those on a host that is lost, too, may live there, and end by themselves.
        """
        ended = self._processes[end.rank]
        for mate in self._serving.replica(end.rank, ended.slot):
            process = self._processes[mate]
            if process is ended or process.is_told:
                continue
            if end.lost and process.host == ended.host:
                continue
            process.is_told = True
            if mate in self._fleet.running:
                self._options.note(
                    f"slot {process.slot} on host {process.host} ends with its replica"
                )
                why = f"the process in slot {ended.slot} of its replica has ended"
                self._fleet.send(signal.SIGKILL, why, {mate})

    def _number_of(self, process: int) -> int | None:
        """Return the member that a process is; None: it has not become one, as far as is known."""
        number = self._coordinator.number_of(process)
        return self._processes[process].member if number is None else number

    def _note_failure(self, process: Process, *, was_cut_off: bool = False) -> None:
        """Note a failure before it is proven.

        So the next world has nobody of a host that is avoided.
        """
        if self._avoided.note(process, was_cut_off=was_cut_off) and self._elastic.retry.whole_host:
            self._coordinator.avoid(process.host)

    def _resigned(self, proof: Proof) -> None:
        """On the coordinator's thread: an exception has left a member's function."""
        if self._elastic.retry.whole_host:
            for member in self._coordinator.world.members:
                if member.number == proof.number:
                    self._coordinator.avoid(member.host)
        with self._lock:
            self._resigned_members.add(proof.number)
        self.supervisor.ring()

    def _is_left_behind(self, process: int) -> bool:
        """Return whether the others go on without it, and have not let it go."""
        member = self._number_of(process)
        is_let_go = self._processes[process].sent_away or self.outcome.ended_well
        return member is not None and not is_let_go and self._coordinator.goes_on_without(member)

    def _hangs(self, number: int, reason: str) -> None:
        """On the coordinator's thread: a member was waited for in vain, and does not notice."""
        self._hung.note(number, reason)
        self.supervisor.ring()

    def _note_resigned(self) -> None:
        with self._lock:
            resigned, self._resigned_members = self._resigned_members, set()
        for number, process in self._processes.items() if resigned else ():
            if self._number_of(number) in resigned and not process.has_resigned:
                process.has_resigned = True
                self._keep()
                for mate in self._processes.values() if self._makes_avoided(process) else ():
                    # The next world is without its host. Others may take their places.
                    mate.sent_away |= mate.host == process.host and not mate.has_resigned

    def _makes_avoided(self, process: Process) -> bool:
        """Return whether its host gets no members until it is known how ``process`` ends."""
        return process.has_resigned and self._elastic.retry.whole_host

    def _formed(self, world: World, reason: str) -> None:
        """On the coordinator's thread."""
        self._options.note(world.announcement(reason))
        self.supervisor.ring()  # who has joined is kept

    def _stopped(self, reason: str) -> None:
        """On the coordinator's thread."""
        with self._lock:
            self._stop_reason = reason
        self.supervisor.ring()

    def let_leave(self, signum: int) -> float:
        """Let all leave before ``signum`` is sent: else some would leave, and others after them.

        Then each world's rank 0 would write a checkpoint.
        """
        if signum not in LEAVING:
            return super().let_leave(signum)
        if self._services is not None:
            self._coordinator.leave(self._coordinator.world.numbers)
        return _LEAVE_S

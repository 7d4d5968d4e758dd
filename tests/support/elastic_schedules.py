"""Random schedules for the membership of elastic jobs: deaths, partitions, joins, takeovers.

Processes, a network and a clock that are simulated around the pure functions of `kolovod.elastic`.
`run(seed)` plays one schedule. It checks after every event what must always hold, and at the end,
when faults are over, that a world forms. A seed always gives the same schedule.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import elastic_faults as faults
from elastic_network import Network, Process
from elastic_rules import (
    Broken,
    check,
    check_history,
    check_stop,
    expect_nothing,
    is_settled,
    note_formed,
    words_of,
    works,
)

from kolovod.coordination import membership as m
from kolovod.coordination.consensus import NOTHING, Ballot, Proof, Record, Stamp, World
from kolovod.coordination.coordinator_state import (
    FIRST_LAUNCHER,
    CoordinatorState,
    coordinator_of,
    first_world,
)

FAULTS_S = 5.0
"""Faults happen in the first seconds."""
PATIENCE_S = 25.0
"""In so many further ones a world has formed, or the schedule has failed."""
_EVENTS = 6000
_TICK_S = 0.5


@dataclass
class Schedule:
    """One job from its start to its end, drawn from a seed."""

    seed: int
    replica_size: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    tracing: bool = False

    def __post_init__(self) -> None:
        """Draw the job and its faults."""
        self.rng = rng = Random(self.seed)
        self.now_s = 0.0
        self.heap: list[tuple[float, int, Any]] = []
        self.sequence = 0
        self.network = Network(rng)
        self.hosts = self.network.hosts
        self.unwanted: frozenset[str] = frozenset()
        self.unread = rng.choice((0.0, 0.0, 0.3))  # deaths that leave no readable record
        self.reports: list[tuple[float, str | None, Proof]] = []
        self.formed: list[World] = []
        self.agreed: dict[Stamp, set[int]] = {}
        self.lossy: set[Stamp] = set()
        self.worked: World | None = None
        self.stopped = ""
        self.doomed = False
        self.done = False
        size = self.replica_size
        count = size * rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8))
        self.policy = m.Policy(
            replica_size=size,
            min_np=size * rng.choice((1, 1, 1, 2)),
            max_np=rng.choice((count, count + 2 * size, 16 * size)),
            elastic_timeout_s=rng.choice((2.0, 60.0)),
            gather_s=rng.choice((0.0, 0.7)),
            prepare_s=rng.choice((0.0, 1.0)),
            silence_s=rng.choice((0.3, 1.0)),
            reset_limit=rng.choice((None, None, None, None, 3)),
            go_on_after_loss=rng.random() < 0.3,
        )
        world = first_world((i, rng.choice(self.hosts)) for i in range(count))
        self.formed.append(world)
        self.processes = [
            Process(i, i, x.host, i, CoordinatorState(world), NOTHING.told(world), i // size)
            for i, x in enumerate(world.members)
        ]
        self.slots = count
        self.by_number = {p.number: p for p in self.processes}
        self._work(world)
        self.launch(FIRST_LAUNCHER, CoordinatorState(world))
        for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
            kind = rng.choices(list(faults.WEIGHTS), list(faults.WEIGHTS.values()))[0]
            self.at(rng.uniform(0.2, FAULTS_S - 0.1), ("fault", kind))
        if size > 1:
            self.at(0.1, ("fault", faults.end_replicas))
        self.at(FAULTS_S, ("over",))

    # The scheduler.

    def play(self) -> Schedule:
        """To the end. Raises Broken."""
        for process in self.processes:
            self.at(self.rng.uniform(0, _TICK_S), ("tick", process))
        while self.heap and not self.done:
            self.now_s, _, event = heapq.heappop(self.heap)
            self.counts["events"] += 1
            self.handle(event)
            if self.sequence > _EVENTS * self.replica_size or self.now_s > FAULTS_S + PATIENCE_S:
                expect_nothing(self)
                break
        return self

    def handle(self, event: Any) -> None:
        kind = event[0]
        if kind == "tick":
            self._tick(event[1])
        elif kind == "message":
            self._deliver(*event[1:])
        elif kind == "fault":
            event[1](self, *event[2:])
        else:
            self._over()

    def at(self, time_s: float, event: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (time_s, self.sequence, event))

    def say(self, *words: Any) -> None:
        if self.tracing:
            self.trace.append(f"{self.now_s:6.2f} " + " ".join(map(str, words)))

    # The network.

    def _hears(self, process: Process, other: Process) -> bool:
        return process is other or (
            other.alive
            and other.stopped_until_s <= self.now_s
            and process.deaf_until_s <= self.now_s
            and self.network.linked(process.host, other.host)
        )

    def _send(self, source: Process, target: Process, kind: str, *what: Any) -> None:
        for delay_s in self.network.delays(source is target):
            event = ("message", source, target, target.number, kind, what, self._facts(source))
            self.at(self.now_s + delay_s, event)

    def _facts(self, process: Process) -> Any:
        return None if process.coordinator_state is None else process.coordinator_state.facts()

    def _deliver(
        self, source: Process, target: Process, number: int, kind: str, what: Any, facts: Any
    ) -> None:
        if not target.alive:
            return
        if target.stopped_until_s > self.now_s:
            event = ("message", source, target, number, kind, what, facts)
            self.at(target.stopped_until_s + 0.001, event)
            return
        if source is not target and not self.network.linked(source.host, target.host):
            return
        self._learn(target, facts)
        if target.number != number and kind != "number":
            return  # it has entered again meanwhile
        getattr(self, f"_on_{kind}")(target, source, *what)

    # A process.

    def _learn(self, process: Process, facts: Any) -> None:
        if facts is None:
            return
        if process.coordinator_state is None:
            process.coordinator_state = CoordinatorState(facts.formed)
        process.coordinator_state.merge(facts, self.now_s)
        if process.number is not None and process.number >= 0:
            process.record = process.record.told(process.coordinator_state.formed)

    def _tick(self, process: Process) -> None:
        if not process.alive:
            return
        if process.stopped_until_s > self.now_s:
            self.at(process.stopped_until_s, ("tick", process))
            return
        self.at(self.now_s + self.rng.uniform(0.5, 1.2) * _TICK_S, ("tick", process))
        state = process.coordinator_state
        reached = {
            p.number
            for p in self.processes
            if p.number is not None and (p is process or self._hears(process, p))
        }
        if state is not None:
            self._look_around(process, state, reached)
            if process.number is not None and process.number >= 0:
                process.record = process.record.told(state.formed)
        if process.number is None:
            self._enter(process)
            return
        if state is None:
            return
        if self._is_left_out(process, state):
            return
        check_history(self, process, process.number)
        launcher = min((n for n in reached if n < 0), default=None)
        who = coordinator_of(state.facts(), launcher, reached)
        believes = process.believes_until_s > self.now_s and process.number in state.formed.numbers
        if who == process.number or believes or process.number < 0:
            self._act(process)
            for n in state.formed.numbers:
                if n != process.number and self.rng.random() < 0.4:
                    self._send(
                        process, self.by_number[n], "facts", state.formed.stamp, process.record
                    )
        elif who is not None and self.rng.random() < 0.7:
            self._send(process, self.by_number[who], "facts", state.formed.stamp, process.record)
        self._work_if_all_do(state.formed)

    def _look_around(self, process: Process, state: CoordinatorState, reached: set[int]) -> None:
        state.unwanted_hosts = self.unwanted
        for number in (*state.formed.numbers, *state.entrants):
            if number in reached:
                state.hear(number)
            else:
                state.miss(number, self.now_s)
        for since_s, host, proof in self.reports:
            told = proof.number in state.proofs and state.proofs[proof.number].record is not None
            here = host is None or self.network.linked(process.host, host)
            if here and not told and since_s <= self.now_s:
                state.prove(proof, self.now_s)

    def _is_left_out(self, process: Process, state: CoordinatorState) -> bool:
        """A world has formed without it: it ends if it wanted that, else it enters again."""
        number = process.number
        assert number is not None
        impatient = self.now_s - process.agreed_s > 3.0
        record = NOTHING if impatient else process.record
        if number < 0 or not _goes_on_without(state, number, record):
            return False
        self.say(f"{number} is left out of epoch {state.formed.epoch}")
        if number in state.leaving:
            self.end(process, "left")
            return True
        self.report(Proof(number, "entered again", process.record), process.host, 0.0)
        process.number, process.record = None, NOTHING
        process.state = None
        return True

    def _enter(self, process: Process) -> None:
        for other in self.processes:
            if other is not process and other.number is not None and self._hears(process, other):
                self._send(process, other, "enter", process.pid)

    def _act(self, process: Process, at_tick: bool = True) -> None:
        """As coordinator. One that was refused asks again with its next tick only."""
        state, number = process.coordinator_state, process.number
        if state is None or number is None:
            return
        for _ in range(6):
            decision = m.decide(state, number, self.policy, self.now_s)
            if self.tracing and process.said != (said := words_of(decision)):
                self.say(f"coordinator {number}:", said)
                process.said = said
            if isinstance(decision, m.Formed):
                self._form(process, state, decision.world)
                continue
            if isinstance(decision, m.Ask):
                candidacy = state.candidacy
                if not at_tick and (candidacy is None or decision.ballot != candidacy.ballot):
                    return
                state.stand(decision.ballot)
                what: tuple[Any, ...] = ("ask", decision.ballot)
            elif isinstance(decision, m.Prepare):
                state.prepare(decision.world, self.now_s)
                what = ("prepare", decision.world)
                self.counts["prepared"] += 1
            elif isinstance(decision, m.Propose):
                state.propose(decision.world, decision.numbers, decision.urgent, decision.reason)
                what = ("propose", decision.world)
            elif isinstance(decision, m.Stop):
                if decision.reason.startswith("no majority"):
                    self.end(process, "gave up")  # others may go on
                else:
                    self._stop(decision.reason)
                return
            else:
                return
            if self.now_s - process.asked_s < 0.1 and what == process.asked:
                return  # they have not had the time to answer
            process.asked_s, process.asked = self.now_s, what
            for n in decision.numbers:
                self._send(process, self.by_number[n], *what)
            return

    # Messages.

    def _on_facts(self, process: Process, source: Process, newest: Stamp, record: Record) -> None:
        if process.coordinator_state is not None:
            process.coordinator_state.see(record)
        if (
            process.coordinator_state is not None
            and process.coordinator_state.formed.stamp > newest
        ):
            self._send(process, source, "formed")

    def _on_ask(self, process: Process, source: Process, ballot: Ballot) -> None:
        if process.number is None or process.number < 0:
            return
        process.record = process.record.promise(ballot) or process.record
        assert process.coordinator_state is not None
        process.coordinator_state.see(process.record)
        self._send(process, source, "promise", process.number, process.record)

    def _on_prepare(self, process: Process, source: Process, world: World) -> None:
        if process.number is not None and process.number >= 0:
            works = self.rng.random() < 0.9
            self._send(process, source, "prepared", process.number, world.stamp, works)

    def _on_prepared(
        self, process: Process, source: Process, number: int, stamp: Stamp, works: bool
    ) -> None:
        assert process.coordinator_state is not None
        process.coordinator_state.prepared(number, stamp, works)
        self._act(process, at_tick=False)

    def _on_propose(self, process: Process, source: Process, world: World) -> None:
        if process.number is None or process.number < 0:
            return
        agreed = process.record.agree(world)
        if agreed is not None:
            process.record, process.agreed_s = agreed, self.now_s
            assert process.coordinator_state is not None
            process.coordinator_state.see(agreed)
            self.agreed.setdefault(world.stamp, set()).add(process.number)
        self._send(process, source, "agree", process.number, world.stamp, process.record)

    def _on_promise(self, process: Process, source: Process, number: int, record: Record) -> None:
        assert process.coordinator_state is not None
        process.coordinator_state.promised(number, record)
        self._act(process, at_tick=False)

    def _on_agree(
        self, process: Process, source: Process, number: int, stamp: Stamp, record: Record
    ) -> None:
        assert process.coordinator_state is not None
        process.coordinator_state.agreed(number, stamp, record)
        self._act(process, at_tick=False)

    def _on_formed(self, process: Process, source: Process) -> None:
        if process.coordinator_state is not None:
            self._work_if_all_do(process.coordinator_state.formed)

    def _on_enter(self, process: Process, source: Process, pid: int) -> None:
        newcomer = self.processes[pid]
        if process.coordinator_state is None or newcomer.number is not None:
            return
        member = process.coordinator_state.enter(newcomer.slot, newcomer.host, self.now_s)
        if member is not None:
            check(member.number not in self.by_number, f"number {member.number} twice")
            self.by_number[member.number] = newcomer
            self.say(f"process {pid} enters as {member.number} on {newcomer.host}")
            self._send(process, newcomer, "number", member.number)

    def _on_number(self, process: Process, source: Process, number: int) -> None:
        if process.number is None:
            process.number = number

    # What must always hold.

    def _form(self, process: Process, state: CoordinatorState, world: World) -> None:
        names = sorted(world.numbers)
        self.say(f"FORMED epoch {world.epoch} {world.ballot} {names} joined {set(world.joined)}")
        note_formed(self, state, world)
        self.counts["formed"] += 1
        self.counts["takeovers"] += process.number != self.formed[-2].ballot.coordinator
        self.counts["joined"] += bool(world.joined)
        self.counts["of several worlds"] += len(world.basis) > 1
        self.counts["without silent members"] += any(
            n not in world.numbers and n not in state.proofs and n not in state.leaving
            for n in world.basis[0].numbers
        )
        state.declare(world, self.now_s)
        self._learn(process, state.facts())
        if self.doomed and self.network.side != dict.fromkeys(self.hosts, 0):
            faults.die_at_once(self, world)
        for other in self.processes:
            if process.alive and other is not process and other.number is not None:
                self._send(process, other, "formed")

    def _work_if_all_do(self, world: World) -> None:
        if (self.worked is None or world.stamp > self.worked.stamp) and works(self, world):
            self._work(world)
            self.say(f"epoch {world.epoch} makes a step")

    def _work(self, world: World) -> None:
        self.worked = world
        for number in world.numbers:
            process = self.by_number[number]
            process.state = world.stamp
            assert process.coordinator_state is not None
            process.coordinator_state.has_state.add(number)

    def _stop(self, reason: str) -> None:
        """A coordinator ends the job; it must not be one that works."""
        self.say("STOPPED", reason)
        self.stopped, self.done = reason, True
        self.counts["stopped"] += 1
        check_stop(self, reason)

    # What faults need.

    def living(self) -> list[Process]:
        return [p for p in self.processes if p.alive and (p.number is None or p.number >= 0)]

    def one(self) -> Process | None:
        living = self.living()
        return self.rng.choice(living) if living else None

    def launch(self, number: int, state: CoordinatorState) -> None:
        host = self.rng.choice([h for h in self.hosts if self.network.host_alive[h]])
        launcher = Process(len(self.processes), -1, host, number, state)
        self.processes.append(launcher)
        self.by_number[number] = launcher

    def end(self, process: Process, cause: str) -> None:
        self.say(f"{cause}: {process.number} on {process.host}")
        process.alive = False
        if process.number is not None and process.number >= 0:
            record = None if self.rng.random() < self.unread else process.record
            proof = Proof(process.number, cause, record)
            delay_s = self.rng.choice((0.01, 0.1, 0.5, 2.0))
            self.report(proof, process.host, delay_s)

    def report(self, proof: Proof, host: str | None, delay_s: float) -> None:
        self.reports.append((self.now_s + delay_s, host, proof))

    def add(self, slot: int) -> None:
        """Start a process there, with those of its replica."""
        first = slot // self.replica_size * self.replica_size
        replica = len(self.processes)
        for each in range(first, first + self.replica_size):
            hosts = [h for h in self.hosts if self.network.host_alive[h]]
            host = self.rng.choice(hosts)
            process = Process(len(self.processes), each, host, None, None, replica=replica)
            self.processes.append(process)
            self.say(f"process {process.pid} starts in slot {each} on {process.host}")
            self.at(self.now_s, ("tick", process))
            self.counts["started"] += 1

    # The end.

    def _over(self) -> None:
        """No more faults: what can be known is, and from now on a world must form."""
        faults.cease(self)
        self.at(self.now_s + 0.5, ("over",))
        self.handle = self._handle_calm  # type: ignore[method-assign]

    def _handle_calm(self, event: Any) -> None:
        if event[0] != "over":
            Schedule.handle(self, event)
        elif is_settled(self):
            self.done = True
            self.counts["settled"] += 1
        else:
            self.at(self.now_s + 0.5, ("over",))


def run(seed: int, replica_size: int = 1) -> Schedule:
    """Play the schedule of ``seed``. A failure has its trace, and how to play it again."""
    try:
        return Schedule(seed, replica_size).play()
    except Exception as error:
        again = Schedule(seed, replica_size, tracing=True)
        with contextlib.suppress(Exception):
            again.play()
        trace = "\n".join(again.trace)
        raise Broken(
            f"seed {seed}: {error!r}\n{trace}\nagain: elastic_schedules.run({seed}, {replica_size})"
        ) from error


def _goes_on_without(state: CoordinatorState, number: int, record: Record) -> bool:
    """Whether worlds go on without that member: it ends, or enters again as another.

    They do not if nobody of the newest world lives, for then the member may be needed, nor while it
    has agreed to a later world; it may hear no more of that one, so it waits for it only for a
    while.
    """
    formed = state.formed
    if number in formed.numbers or number in state.entrants:
        return False
    if formed.numbers <= state.proofs.keys():
        return False
    agreed = record.agreed
    return agreed is None or agreed.stamp <= formed.stamp or number not in agreed.numbers

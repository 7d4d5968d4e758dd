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

from kolovod.elastic import membership as m
from kolovod.elastic.ballots import NOTHING, Ballot, Proof, Record, Stamp, World
from kolovod.elastic.table import FIRST_LAUNCHER, Table, first_world, steward_of

FAULTS_S = 5.0
"""Faults happen in the first seconds."""
PATIENCE_S = 25.0
"""In so many further ones a world has formed, or the schedule has failed."""
_EVENTS = 6000
_TICK_S = 0.5
_FAULTS = {
    "kill": 5,
    "host": 1,
    "part": 3,
    "heal": 2,
    "join": 3,
    "return": 2,
    "leave": 2,
    "stop": 3,
}
_FAULTS |= {"cut": 4, "tragedy": 3, "duel": 3}
_FAULTS |= {"deaf": 3, "launcher": 2, "attach": 1, "unwanted": 1, "lose": 1, "believe": 2}


class Broken(AssertionError):
    """Something that must always hold does not."""


@dataclass(eq=False)
class Process:
    """A rank, or a launcher: its own number is negative."""

    pid: int
    slot: int
    host: str
    number: int | None
    table: Table | None
    record: Record = NOTHING
    alive: bool = True
    stopped_until_s: float = 0.0
    believes_until_s: float = 0.0
    """So long it takes itself for the steward."""
    deaf_until_s: float = 0.0
    """So long it hears nobody, but is heard."""
    epoch: int = 0
    state: Stamp | None = None
    """Of the world that made the last step of which it has the result."""
    agreed_s: float = -9.0
    asked: Any = None
    asked_s: float = -9.0
    said: str = ""


@dataclass
class Schedule:
    """One job from its start to its end, drawn from a seed."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    tracing: bool = False

    def __post_init__(self) -> None:
        """Draw the job and its faults."""
        self.rng = rng = Random(self.seed)
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Any]] = []
        self._sequence = 0
        self._hosts = [f"h{i}" for i in range(rng.choice((1, 2, 2, 3, 3, 4)))]
        self._side = dict.fromkeys(self._hosts, 0)
        self._cut: set[frozenset[str]] = set()
        self._host_alive = dict.fromkeys(self._hosts, True)
        self._unwanted: frozenset[str] = frozenset()
        self._loss = rng.choice((0.0, 0.0, 0.05, 0.2))
        self._twice = rng.choice((0.0, 0.1, 0.3))
        self._slow = rng.choice((0.0, 0.1, 0.3, 0.5))
        self._unread = rng.choice((0.0, 0.0, 0.3))  # deaths that leave no readable record
        self._reports: list[tuple[float, str | None, Proof]] = []
        self.formed: list[World] = []
        self._agreed: dict[Stamp, set[int]] = {}
        self._lossy: set[Stamp] = set()
        self.worked: World | None = None
        self.stopped = ""
        self._doomed = False
        self._done = False
        count = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7, 8))
        self.policy = m.Policy(
            min_np=rng.choice((1, 1, 1, 2)),
            max_np=rng.choice((count, count + 2, 16)),
            elastic_timeout_s=rng.choice((2.0, 60.0)),
            gather_s=rng.choice((0.0, 0.7)),
            silence_s=rng.choice((0.3, 1.0)),
            reset_limit=rng.choice((None, None, None, None, 3)),
            go_on_after_loss=rng.random() < 0.3,
        )
        world = first_world((i, rng.choice(self._hosts)) for i in range(count))
        self.formed.append(world)
        self.processes = [
            Process(i, i, x.host, i, Table(world), NOTHING.told(world))
            for i, x in enumerate(world.members)
        ]
        self._slots = count
        self.by_number = {p.number: p for p in self.processes}
        self._work(world)
        self._launch(FIRST_LAUNCHER, Table(world))
        for _ in range(rng.choice((1, 2, 3, 4, 6, 9))):
            kind = rng.choices(list(_FAULTS), list(_FAULTS.values()))[0]
            self._at(rng.uniform(0.2, FAULTS_S - 0.1), ("fault", kind))
        self._at(FAULTS_S, ("over",))

    # The scheduler.

    def play(self) -> Schedule:
        """To the end. Raises Broken."""
        for process in self.processes:
            self._at(self.rng.uniform(0, _TICK_S), ("tick", process))
        while self._heap and not self._done:
            self.now_s, _, event = heapq.heappop(self._heap)
            self.counts["events"] += 1
            self._handle(event)
            if self._sequence > _EVENTS or self.now_s > FAULTS_S + PATIENCE_S:
                self._expect_nothing()
                break
        return self

    def _handle(self, event: Any) -> None:
        kind = event[0]
        if kind == "tick":
            self._tick(event[1])
        elif kind == "message":
            self._deliver(*event[1:])
        elif kind == "fault":
            getattr(self, f"_fault_{event[1]}")(*event[2:])
        else:
            self._over()

    def _at(self, time_s: float, event: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, self._sequence, event))

    def _say(self, *words: Any) -> None:
        if self.tracing:
            self.trace.append(f"{self.now_s:6.2f} " + " ".join(map(str, words)))

    def _check(self, right: bool, what: str) -> None:
        if not right:
            raise Broken(what)

    # The network.

    def _linked(self, a: str, b: str) -> bool:
        if a == b:
            return self._host_alive[b]
        linked = self._side[a] == self._side[b] and frozenset((a, b)) not in self._cut
        return linked and self._host_alive[b]

    def _hears(self, process: Process, other: Process) -> bool:
        return process is other or (
            other.alive
            and other.stopped_until_s <= self.now_s
            and process.deaf_until_s <= self.now_s
            and self._linked(process.host, other.host)
        )

    def _send(self, source: Process, target: Process, kind: str, *what: Any) -> None:
        rng = self.rng
        for _ in range(2 if rng.random() < self._twice else 1):
            delay_s = rng.uniform(0.01, 0.06)
            if rng.random() < self._slow:
                delay_s += rng.uniform(0.2, 3.0)
            if source is target:
                delay_s = 0.0
            elif rng.random() < self._loss:
                continue
            event = ("message", source, target, target.number, kind, what, self._facts(source))
            self._at(self.now_s + delay_s, event)

    def _facts(self, process: Process) -> Any:
        return None if process.table is None else process.table.facts()

    def _deliver(
        self, source: Process, target: Process, number: int, kind: str, what: Any, facts: Any
    ) -> None:
        if not target.alive:
            return
        if target.stopped_until_s > self.now_s:
            event = ("message", source, target, number, kind, what, facts)
            self._at(target.stopped_until_s + 0.001, event)
            return
        if source is not target and not self._linked(source.host, target.host):
            return
        self._learn(target, facts)
        if target.number != number and kind != "number":
            return  # it has entered again meanwhile
        getattr(self, f"_on_{kind}")(target, source, *what)

    # A process.

    def _learn(self, process: Process, facts: Any) -> None:
        if facts is None:
            return
        if process.table is None:
            process.table = Table(facts.formed)
        process.table.merge(facts, self.now_s)
        if process.number is not None and process.number >= 0:
            process.record = process.record.told(process.table.formed)

    def _tick(self, process: Process) -> None:
        if not process.alive:
            return
        if process.stopped_until_s > self.now_s:
            self._at(process.stopped_until_s, ("tick", process))
            return
        self._at(self.now_s + self.rng.uniform(0.5, 1.2) * _TICK_S, ("tick", process))
        table = process.table
        reached = {
            p.number
            for p in self.processes
            if p.number is not None and (p is process or self._hears(process, p))
        }
        if table is not None:
            self._look_around(process, table, reached)
            if process.number is not None and process.number >= 0:
                process.record = process.record.told(table.formed)
        if process.number is None:
            self._enter(process)
            return
        if table is None:
            return
        if self._is_left_out(process, table):
            return
        self._check_history(process, process.number)
        launcher = min((n for n in reached if n < 0), default=None)
        who = steward_of(table.facts(), launcher, reached)
        believes = process.believes_until_s > self.now_s and process.number in table.formed.numbers
        if who == process.number or believes or process.number < 0:
            self._act(process)
            for n in table.formed.numbers:
                if n != process.number and self.rng.random() < 0.4:
                    self._send(
                        process, self.by_number[n], "facts", table.formed.stamp, process.record
                    )
        elif who is not None and self.rng.random() < 0.7:
            self._send(process, self.by_number[who], "facts", table.formed.stamp, process.record)
        self._work_if_all_do(table.formed)

    def _look_around(self, process: Process, table: Table, reached: set[int]) -> None:
        table.unwanted_hosts = self._unwanted
        for number in (*table.formed.numbers, *table.entrants):
            if number in reached:
                table.hear(number)
            else:
                table.miss(number, self.now_s)
        for since_s, host, proof in self._reports:
            told = proof.number in table.proofs and table.proofs[proof.number].record is not None
            here = host is None or self._linked(process.host, host)
            if here and not told and since_s <= self.now_s:
                table.prove(proof, self.now_s)

    def _is_left_out(self, process: Process, table: Table) -> bool:
        """A world has formed without it: it ends if it wanted that, else it enters again."""
        number = process.number
        assert number is not None
        impatient = self.now_s - process.agreed_s > 3.0
        record = NOTHING if impatient else process.record
        if number < 0 or not table.is_left_out(number, record):
            return False
        self._say(f"{number} is left out of epoch {table.formed.epoch}")
        if number in table.leaving:
            self._end(process, "left")
            return True
        self._report(Proof(number, "entered again", process.record), process.host, 0.0)
        process.number, process.record = None, NOTHING
        process.state = None
        return True

    def _enter(self, process: Process) -> None:
        for other in self.processes:
            if other is not process and other.number is not None and self._hears(process, other):
                self._send(process, other, "enter", process.pid)

    def _act(self, process: Process, at_tick: bool = True) -> None:
        """As steward. One that was refused asks again with its next tick only."""
        table, number = process.table, process.number
        if table is None or number is None:
            return
        for _ in range(6):
            decision = m.decide(table, number, self.policy, self.now_s)
            if self.tracing and process.said != (said := _short(decision)):
                self._say(f"steward {number}:", said)
                process.said = said
            if isinstance(decision, m.Formed):
                self._form(process, table, decision.world)
                continue
            if isinstance(decision, m.Ask):
                office = table.office
                if not at_tick and (office is None or decision.ballot != office.ballot):
                    return
                table.stand(decision.ballot)
                what: tuple[Any, ...] = ("ask", decision.ballot)
            elif isinstance(decision, m.Propose):
                table.propose(decision.world, decision.numbers, decision.urgent, decision.reason)
                what = ("propose", decision.world)
            elif isinstance(decision, m.Stop):
                if decision.reason.startswith("no majority"):
                    self._end(process, "gave up")  # others may go on
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
        if process.table is not None:
            process.table.see(record)
        if process.table is not None and process.table.formed.stamp > newest:
            self._send(process, source, "formed")

    def _on_ask(self, process: Process, source: Process, ballot: Ballot) -> None:
        if process.number is None or process.number < 0:
            return
        process.record = process.record.promise(ballot) or process.record
        assert process.table is not None
        process.table.see(process.record)
        self._send(process, source, "promise", process.number, process.record)

    def _on_propose(self, process: Process, source: Process, world: World) -> None:
        if process.number is None or process.number < 0:
            return
        agreed = process.record.agree(world)
        if agreed is not None:
            process.record, process.agreed_s = agreed, self.now_s
            assert process.table is not None
            process.table.see(agreed)
            self._agreed.setdefault(world.stamp, set()).add(process.number)
        self._send(process, source, "agree", process.number, world.stamp, process.record)

    def _on_promise(self, process: Process, source: Process, number: int, record: Record) -> None:
        assert process.table is not None
        process.table.promised(number, record)
        self._act(process, at_tick=False)

    def _on_agree(
        self, process: Process, source: Process, number: int, stamp: Stamp, record: Record
    ) -> None:
        assert process.table is not None
        process.table.agreed(number, stamp, record)
        self._act(process, at_tick=False)

    def _on_formed(self, process: Process, source: Process) -> None:
        if process.table is not None:
            self._work_if_all_do(process.table.formed)

    def _on_enter(self, process: Process, source: Process, pid: int) -> None:
        newcomer = self.processes[pid]
        if process.table is None or newcomer.number is not None:
            return
        member = process.table.enter(newcomer.slot, newcomer.host, self.now_s)
        if member is not None:
            self._check(member.number not in self.by_number, f"number {member.number} twice")
            self.by_number[member.number] = newcomer
            self._say(f"process {pid} enters as {member.number} on {newcomer.host}")
            self._send(process, newcomer, "number", member.number)

    def _on_number(self, process: Process, source: Process, number: int) -> None:
        if process.number is None:
            process.number = number

    # What must always hold.

    def _form(self, process: Process, table: Table, world: World) -> None:
        names = sorted(world.numbers)
        self._say(f"FORMED epoch {world.epoch} {world.ballot} {names} joined {set(world.joined)}")
        line = table.line()
        dead = world.numbers & table.proofs.keys()
        self._check(not dead, f"{dead} of epoch {world.epoch} were proven dead")
        missing = world.numbers - self._agreed.get(world.stamp, set())
        self._check(not missing, f"{missing} have not agreed to epoch {world.epoch}")
        known = {w.epoch: w.stamp for w in self.formed}
        self._check(world.epoch not in known, f"epoch {world.epoch} has formed twice")
        if (line.lost and not line.idle) or world.joined == world.numbers:
            self._lossy.add(world.stamp)
        self.formed.append(world)
        self.formed.sort(key=lambda w: w.stamp)
        for before, after in zip(self.formed, self.formed[1:], strict=False):
            self._check(
                before.stamp in {w.stamp for w in after.basis},
                f"epoch {after.epoch} does not follow epoch {before.epoch}",
            )
            self._check(before.epoch < after.epoch, "epochs do not grow")
        able = [w.epoch for w in self.formed if self._can_work(w)]
        self._check(len(able) <= 1, f"worlds of epochs {able} could all work")
        self._check_state(world)
        self.counts["formed"] += 1
        self.counts["takeovers"] += process.number != self.formed[-2].ballot.steward
        self.counts["joined"] += bool(world.joined)
        self.counts["of several worlds"] += len(world.basis) > 1
        self.counts["without silent members"] += any(
            n not in world.numbers and n not in table.proofs and n not in table.leaving
            for n in world.basis[0].numbers
        )
        table.declare(world, self.now_s)
        self._learn(process, table.facts())
        if self._doomed and self._side != dict.fromkeys(self._hosts, 0):
            self._die_at_once(world)
        for other in self.processes:
            if process.alive and other is not process and other.number is not None:
                self._send(process, other, "formed")

    def _check_history(self, process: Process, number: int) -> None:
        """The worlds in which a member works follow each other, and what it agreed to."""
        world, agreed = process.record.works_in(number), process.record.agreed
        if world is None:
            return
        self._check(
            agreed is None or agreed.stamp <= world.stamp,
            f"{number} works in epoch {world.epoch} and has agreed to a later one",
        )
        self._check(world.epoch >= process.epoch, f"{number} goes back to epoch {world.epoch}")
        process.epoch = world.epoch

    def _check_state(self, world: World) -> None:
        """Who does not count as a joiner has the result of the last step, or that is lost."""
        last = self.worked
        if last is None or last.stamp > world.stamp or world.stamp in self._lossy:
            return
        for number in world.numbers - world.joined:
            process = self.by_number[number]
            self._check(
                process.state == last.stamp or process.number != number,
                f"{number} brings no state of epoch {last.epoch} to epoch {world.epoch}",
            )
        self._check(world.joined != world.numbers, f"epoch {world.epoch} has no state")

    def _can_work(self, world: World) -> bool:
        """Whether no member is dead or has agreed to a newer world."""
        for number in world.numbers:
            process = self.by_number[number]
            if not process.alive or process.number != number:
                return False
            agreed = process.record.agreed
            if agreed is not None and agreed.stamp > world.stamp:
                return False
        return True

    def _works(self, world: World) -> bool:
        """Whether all members live and take it for the world to work in."""
        for number in world.numbers:
            process = self.by_number[number]
            if not process.alive or process.number != number:
                return False
            here = process.record.works_in(number)
            if here is None or here.stamp != world.stamp:
                return False
        return True

    def _work_if_all_do(self, world: World) -> None:
        if (self.worked is None or world.stamp > self.worked.stamp) and self._works(world):
            self._work(world)
            self._say(f"epoch {world.epoch} makes a step")

    def _work(self, world: World) -> None:
        self.worked = world
        for number in world.numbers:
            process = self.by_number[number]
            process.state = world.stamp
            assert process.table is not None
            process.table.has_state.add(number)

    def _stop(self, reason: str) -> None:
        """A steward ends the job; it must not be one that works."""
        self._say("STOPPED", reason)
        self.stopped, self._done = reason, True
        self.counts["stopped"] += 1
        if "may have followed" not in reason and "reset limit" not in reason:
            able = [w for w in self.formed if w is self.worked and self._works(w)]
            few = self.policy.min_np > 1 and "at least" in reason
            self._check(not able or few or "leave" in reason, f"stopped a job that works: {reason}")

    # Faults.

    def _living(self) -> list[Process]:
        return [p for p in self.processes if p.alive and (p.number is None or p.number >= 0)]

    def _one(self) -> Process | None:
        living = self._living()
        return self.rng.choice(living) if living else None

    def _launch(self, number: int, table: Table) -> None:
        host = self.rng.choice([h for h in self._hosts if self._host_alive[h]])
        launcher = Process(len(self.processes), -1, host, number, table)
        self.processes.append(launcher)
        self.by_number[number] = launcher

    def _end(self, process: Process, cause: str) -> None:
        self._say(f"{cause}: {process.number} on {process.host}")
        process.alive = False
        if process.number is not None and process.number >= 0:
            record = None if self.rng.random() < self._unread else process.record
            proof = Proof(process.number, cause, record)
            delay_s = self.rng.choice((0.01, 0.1, 0.5, 2.0))
            self._report(proof, process.host, delay_s)

    def _report(self, proof: Proof, host: str | None, delay_s: float) -> None:
        self._reports.append((self.now_s + delay_s, host, proof))

    def _fault_kill(self) -> None:
        process = self._one()
        if process is not None:
            self.counts["deaths"] += 1
            self._end(process, "killed")

    def _fault_launcher(self) -> None:
        for process in self.processes:
            if process.alive and process.number is not None and process.number < 0:
                self.counts["launchers killed"] += 1
                self._end(process, "launcher killed")

    def _fault_attach(self) -> None:
        launchers = [p for p in self.processes if p.number is not None and p.number < 0]
        member = self._one()
        if member is None or member.table is None or any(p.alive for p in launchers):
            return
        self.counts["launchers attached"] += 1
        table = Table(member.table.formed)
        table.merge(member.table.facts(), self.now_s)
        self._launch(-1 - len(launchers), table)
        self._at(self.now_s, ("tick", self.processes[-1]))

    def _fault_host(self) -> None:
        hosts = [h for h in self._hosts if self._host_alive[h]]
        if len(hosts) < 2:
            return
        host = self.rng.choice(hosts)
        self.counts["hosts lost"] += 1
        self._say("host lost", host)
        self._host_alive[host] = False
        heard = self.rng.random() < 0.3  # a scheduler tells
        for process in self.processes:
            if process.host == host and process.alive:
                process.alive = False
                if heard and process.number is not None and process.number >= 0:
                    self._report(Proof(process.number, "host lost"), None, 0.5)

    def _fault_part(self) -> None:
        if len(self._hosts) > 1:
            self.counts["partitions"] += 1
            for host in self._hosts:
                self._side[host] = self.rng.randrange(2)
            self._say("sides", self._side)

    def _fault_cut(self) -> None:
        """Two hosts that do not hear each other, but others hear both."""
        if len(self._hosts) > 2:
            self.counts["links cut"] += 1
            for _ in range(self.rng.choice((1, 1, 2))):
                self._cut.add(frozenset(self.rng.sample(self._hosts, 2)))
            self._say("cut", [sorted(pair) for pair in self._cut])

    def _fault_tragedy(self) -> None:
        """A side goes on alone for a while and dies; the other one hears of that."""
        if len(self._hosts) > 1:
            self.counts["sides lost"] += 1
            away = self.rng.randrange(len(self._hosts))
            for i, host in enumerate(self._hosts):
                self._side[host] = int(i == away)
            self._say("sides", self._side)
            lost = self._hosts[away]
            side = [lost] if self.rng.random() < 0.5 else [h for h in self._hosts if h != lost]
            if self.rng.random() < 0.5:
                self._doomed = True
                return
            self._at(self.now_s + self.rng.choice((0.7, 1.5, 2.5)), ("fault", "ruin", side))

    def _fault_ruin(self, hosts: list[str]) -> None:
        unread = self.rng.random() < 0.5
        self._side = dict.fromkeys(self._hosts, 0)
        for process in self.processes:
            if process.host in hosts and process.alive and process.slot >= 0:
                process.alive = False
                self._say(f"dies with its side: {process.number}, record {not unread}")
                if process.number is not None:
                    record = None if unread else process.record
                    self._report(Proof(process.number, "side lost", record), None, 0.1)

    def _die_at_once(self, world: World) -> None:
        """Before members of a world that a side has formed have heard of it, they die."""
        self._doomed = False
        self.counts["died before they heard"] += 1
        self._side = dict.fromkeys(self._hosts, 0)
        for number in world.numbers:
            if self.rng.random() < 0.85:
                self._say(f"dies before it hears: {number}")
                process = self.by_number[number]
                process.alive = False
                self._report(Proof(number, "killed", process.record), None, 0.1)

    def _fault_duel(self) -> None:
        """Several take themselves for the steward, and see different members."""
        for process in self.rng.sample(self.processes, min(3, len(self.processes))):
            process.believes_until_s = self.now_s + 1.5
            if self.rng.random() < 0.5:
                process.deaf_until_s = self.now_s + self.rng.choice((0.4, 1.5))
        self.counts["duels"] += 1

    def _fault_heal(self) -> None:
        self._cut = set()
        self._side = dict.fromkeys(self._hosts, 0)
        self._say("healed")

    def _add(self, slot: int) -> None:
        hosts = [h for h in self._hosts if self._host_alive[h]]
        process = Process(len(self.processes), slot, self.rng.choice(hosts), None, None)
        self.processes.append(process)
        self._say(f"process {process.pid} starts in slot {slot} on {process.host}")
        self._at(self.now_s, ("tick", process))
        self.counts["started"] += 1

    def _fault_join(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            self._slots += 1
            self._add(self._slots - 1)

    def _fault_return(self) -> None:
        dead = [p for p in self.processes if not p.alive and p.slot >= 0]
        if dead:
            self._add(self.rng.choice(dead).slot)

    def _fault_leave(self) -> None:
        process = self._one()
        if process is not None and process.number is not None and process.table is not None:
            self.counts["leaves"] += 1
            self._say(f"{process.number} is told to leave")
            process.table.leave(process.number, self.now_s)

    def _fault_stop(self) -> None:
        process = self.rng.choice(self.processes)
        process.stopped_until_s = self.now_s + self.rng.choice((0.3, 1.0, 3.0))
        self._say(f"{process.number} is stopped until {process.stopped_until_s:.2f}")
        self.counts["stopped processes"] += 1

    def _fault_deaf(self) -> None:
        process = self.rng.choice(self.processes)
        process.deaf_until_s = self.now_s + self.rng.choice((0.5, 1.5, 3.0))
        self._say(f"{process.number} hears nobody until {process.deaf_until_s:.2f}")
        self.counts["deaf"] += 1

    def _fault_believe(self) -> None:
        for process in self._living():
            if self.rng.random() < 0.6:
                process.believes_until_s = self.now_s + self.rng.choice((0.5, 2.0))
        self.counts["several stewards"] += 1

    def _fault_unwanted(self) -> None:
        if len(self._hosts) > 1:
            self._unwanted = frozenset([self.rng.choice(self._hosts)])
            self._say("unwanted", set(self._unwanted))
            self.counts["hosts unwanted"] += 1

    def _fault_lose(self) -> None:
        self._loss = 0.5

    # The end.

    def _over(self) -> None:
        """No more faults: what can be known is, and from now on a world must form."""
        self._say("no more faults")
        self._fault_heal()
        self._loss = self._slow = 0.0
        for process in self.processes:
            process.stopped_until_s = process.believes_until_s = process.deaf_until_s = self.now_s
        told = {proof.number for _, _, proof in self._reports}
        for number, process in self.by_number.items():
            if number >= 0 and not process.alive and number not in told:
                self._report(Proof(number, "host lost"), None, 0.0)
        self._reports = [
            (self.now_s, host if host and self._host_alive[host] else None, proof)
            for _, host, proof in self._reports
        ]
        self._at(self.now_s + 0.5, ("over",))
        self._handle = self._handle_calm  # type: ignore[method-assign]

    def _handle_calm(self, event: Any) -> None:
        if event[0] != "over":
            Schedule._handle(self, event)
        elif self._is_settled():
            self._done = True
            self.counts["settled"] += 1
        else:
            self._at(self.now_s + 0.5, ("over",))

    def _is_settled(self) -> bool:
        """Whether the newest world works and has all that it may have."""
        world = self.formed[-1]
        if not self._works(world):
            return False
        table = next(p.table for p in self.processes if p.number == min(world.numbers))
        assert table is not None
        staying = [
            x for x in world.members if x.number in table.leaving or x.host in self._unwanted
        ]
        if staying and len(staying) < len(world.members):
            return len(world.members) - len(staying) < self.policy.min_np or self._limit(world)
        slots = {x.slot for x in world.members}
        outside = [
            p
            for p in self._living()
            if p.number not in world.numbers
            and p.slot not in slots
            and p.host not in self._unwanted
            and p.number not in table.leaving
        ]
        return not outside or len(world.members) >= self.policy.max_np or self._limit(world)

    def _limit(self, world: World) -> bool:
        return self.policy.reset_limit is not None and world.resets >= self.policy.reset_limit

    def _expect_nothing(self) -> None:
        """No world has formed though faults are over: only right if none could."""
        if self._can_settle():
            world = self.formed[-1]
            raise Broken(
                f"no world forms after epoch {world.epoch} of "
                f"{sorted(world.numbers)} at {self.now_s:.1f} s, {self._sequence} events"
            )
        self.counts["without a quorum"] += 1

    def _can_settle(self) -> bool:
        """Whether a quorum of all that may have formed lives, and enough members.

        Of what somebody alive or a record tells: a world that only others knew of counts as open.
        """
        proofs: dict[int, Proof] = {}
        for _, _, proof in self._reports:
            if proof.number not in proofs or proofs[proof.number].record is None:
                proofs[proof.number] = proof
        alive = {p.number: p.record for p in self._living() if p.number is not None}
        records = [*alive.values(), *(p.record for p in proofs.values() if p.record is not None)]
        known = [p.table.formed for p in self.processes if p.alive and p.table is not None]
        known += [record.formed for record in records if record.formed is not None]
        if not known:
            return False
        newest = max(known, key=lambda world: world.stamp)
        worlds = {newest.stamp: newest}
        for record in records:
            if record.agreed is not None and record.agreed.stamp > newest.stamp:
                worlds[record.agreed.stamp] = record.agreed
                worlds |= {w.stamp: w for w in record.agreed.basis if w.stamp > newest.stamp}
        if not all(_decides(world, set(alive), proofs) for world in worlds.values()):
            return False
        stay = [x for x in newest.members if x.number in alive and x.host not in self._unwanted]
        leaving = set().union(*(p.table.leaving for p in self._living() if p.table is not None))
        stay = [x for x in stay if x.number not in leaving]
        return len(stay) >= max(1, self.policy.min_np)


def _decides(world: World, alive: set[int], proofs: dict[int, Proof]) -> bool:
    """The quorum rule, written once more."""
    dead = {n for n in world.numbers if n in proofs}
    if len({member.host for member in world.members}) == 1:
        return world.numbers - dead <= alive
    voters = world.numbers - {n for n in dead if proofs[n].record is not None}
    half = len(voters) / 2
    here = voters & alive
    return not voters or len(here) > half or (len(here) == half and min(voters) in here)


def _short(decision: Any) -> str:
    name = type(decision).__name__
    if isinstance(decision, m.Ask):
        return f"{name} {tuple(decision.ballot)} {decision.numbers}"
    if isinstance(decision, m.Propose | m.Formed):
        world = decision.world
        basis = [w.epoch for w in world.basis]
        to = getattr(decision, "numbers", "")
        return (
            f"{name} {world.epoch} {sorted(world.numbers)} after {basis} to {to}: {decision.reason}"
        )
    return f"{name} {decision.reason}"


def run(seed: int) -> Schedule:
    """Play the schedule of ``seed``. A failure has its trace, and how to play it again."""
    try:
        return Schedule(seed).play()
    except Exception as error:
        again = Schedule(seed, tracing=True)
        with contextlib.suppress(Exception):
            again.play()
        trace = "\n".join(again.trace)
        raise Broken(
            f"seed {seed}: {error!r}\n{trace}\nagain: elastic_schedules.run({seed})"
        ) from error

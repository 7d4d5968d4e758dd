"""The facts that a coordinator knows, and tells members, and what its ballot got it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kolovod.coordination.consensus import (
    Ballot,
    Line,
    Member,
    Proof,
    Record,
    Stamp,
    World,
    has_quorum,
    line_of,
)
from kolovod.coordination.failures import Failures

__all__ = [
    "FIRST_LAUNCHER",
    "Facts",
    "Candidacy",
    "CoordinatorState",
    "first_world",
    "coordinator_of",
]

FIRST_LAUNCHER = -1
"""The coordinator's number of the launcher that starts a job; one that attaches later takes a lower
one that nobody had."""
_NUMBERS_PER_TERM = 1 << 20
_TERM_OF_START = 0


class Facts(NamedTuple):
    """The facts that coordinators and members tell each other, whenever they have changed.

    The order in which they are merged does not matter.
    """

    formed: World
    proofs: Mapping[int, Proof]
    entrants: Mapping[int, Member]
    leaving: frozenset[int]
    has_state: frozenset[int]


def first_world(members: Iterable[tuple[int, str]]) -> World:
    """Return the world that a job starts with. ``members``: slot and host, in the order of ranks.

    Each starts with the record ``NOTHING.told(world)``.
    """
    found = tuple(Member(number, slot, host) for number, (slot, host) in enumerate(members))
    ballot = Ballot(_TERM_OF_START, FIRST_LAUNCHER)
    return World(ballot, 1, found)


def coordinator_of(facts: Facts, launcher: int | None, reached: Collection[int]) -> int | None:
    """Return who should be coordinator for a process that reaches ``reached``, itself among them.

    ``launcher``: its number if it can be reached. None: nobody that may be coordinator is reached.
    """
    if launcher is not None:
        return launcher
    by_rank = (member.number for member in facts.formed.members)
    return next((n for n in by_rank if n in reached and n not in facts.proofs), None)


@dataclass
class Preparation:
    """The preparation of a world whose engine forms beside the present one."""

    world: World
    since_s: float
    works: set[int] = field(default_factory=set)
    """Members that have formed it."""
    has_failed: bool = False


@dataclass
class Candidacy:
    """The answers that a coordinator has got under its ballot, and what it has done with them."""

    ballot: Ballot
    answers: dict[int, Record] = field(default_factory=dict)
    proposal: World | None = None
    agreed: set[int] = field(default_factory=set)
    excused: frozenset[int] = frozenset()
    """The members that were dead without a record when the proposal was made."""
    asked: set[int] = field(default_factory=set)
    """Members that were asked to agree since a world has formed: one that has agreed has
    stopped."""
    silent: frozenset[int] = frozenset()
    """Members of which nothing was heard when the proposal was made."""
    urgent: bool = False
    reason: str = ""
    preparation: Preparation | None = None
    entered: int = 0
    """How many numbers it has given away."""


class CoordinatorState:
    """The knowledge of a coordinator, or of a member that may become one.

    It collects; `decide` reads it.
    """

    def __init__(self, formed: World) -> None:
        """``formed``: a world that has formed."""
        self.formed = formed
        self.proofs: dict[int, Proof] = {}
        self.entrants: dict[int, Member] = {}
        """Those who have a number and wait for a world."""
        self.leaving: set[int] = set()
        self.stopped: dict[int, int] = {}
        """The epoch in which a member has stopped for what follows, after the same step as all."""
        self.has_state: set[int] = set()
        """Joiners that have got the state since; their next message says so."""
        self.refused_hosts: frozenset[str] = frozenset()
        """Hosts that get no new members: they cool down."""
        self.unwanted_hosts: frozenset[str] = frozenset()
        """Hosts whose members shall leave, too."""
        self.coming: set[int] = set()
        """Slots whose processes were started, and have not said anything yet."""
        self.candidacy: Candidacy | None = None
        self.top_term = formed.ballot.term
        self.top_epoch = formed.epoch
        self.since_s: dict[int, float] = {}
        """Since when a member is known to be dead, leaving or waiting, by this clock."""
        self.silent_s: dict[int, float] = {}
        """Since when nothing was heard of a member."""
        self.left_behind: set[int] = set()
        """Members without which worlds have formed since they could not be heard of."""
        self.failures = Failures()
        self.formed_s: float | None = None
        """Since when the newest world works, if this coordinator has formed it."""
        self._deposed = False

    # What happens.

    def facts(self) -> Facts:
        """Return the facts for messages; of the dead only those that matter for worlds to come."""
        waiting = {n: member for n, member in self.entrants.items() if n not in self.proofs}
        present = waiting.keys() | self.formed.numbers
        matter = present.union(*(world.numbers for world in self._worlds_at_the_end()))
        return Facts(
            self.formed,
            {number: proof for number, proof in self.proofs.items() if number in matter},
            waiting,
            frozenset(self.leaving & present),
            frozenset(self.has_state & present),
        )

    def version(self) -> object:
        """Return a value that differs, compared by ``==``, whenever ``facts`` may differ."""
        known = sum(proof.record is not None for proof in self.proofs.values())
        candidacy = self.candidacy
        proposal = (
            None if candidacy is None or candidacy.proposal is None else candidacy.proposal.stamp
        )
        return (
            self.formed.stamp,
            (len(self.proofs), known),
            tuple(self.entrants),
            frozenset(self.leaving),
            frozenset(self.has_state),
            proposal,
        )

    def _worlds_at_the_end(self) -> list[World]:
        """Return the newest that has formed, what it follows, and what may follow it."""
        candidacy = self.candidacy
        records = [proof.record for proof in self.proofs.values() if proof.record is not None]
        found = [self.formed]
        if candidacy is not None:
            records += candidacy.answers.values()
            found += [candidacy.proposal] if candidacy.proposal is not None else []
        for record in records:
            if record.agreed is not None and record.agreed.stamp > self.formed.stamp:
                found.append(record.agreed)
        return [world for last in found for world in (last, *last.basis)]

    def merge(self, facts: Facts, now_s: float) -> None:
        """Take what another coordinator or member knows."""
        self._see_world(facts.formed)
        for proof in facts.proofs.values():
            self.prove(proof, now_s)
        for number, member in facts.entrants.items():
            if number not in self.entrants:
                self.entrants[number] = member
                self.since_s.setdefault(number, now_s)
        for number in facts.leaving:
            self.leave(number, now_s)
        self.has_state |= facts.has_state

    def prove(self, proof: Proof, now_s: float) -> None:
        """Note that a member has ended. Of two proofs the one with a record counts."""
        before = self.proofs.get(proof.number)
        if before is None:
            self.since_s[proof.number] = now_s
        if before is None or before.record is None:
            self.proofs[proof.number] = proof
            if proof.record is not None:
                self.see(proof.record)

    def leave(self, number: int, now_s: float) -> None:
        """Note that a member wants to leave, or is told to (SIGTERM)."""
        if number not in self.leaving:
            self.leaving.add(number)
            self.since_s[number] = now_s

    def fail(
        self, epoch: int, reason: str, now_s: float, member: int, unreached: int | None = None
    ) -> None:
        """A member says that the world of ``epoch`` works no more, whoever may be lost."""
        if epoch == self.formed.epoch:
            self.failures.note(self.formed, reason, now_s, member, unreached)

    def enter(self, slot: int, host: str, now_s: float) -> Member | None:
        """Return the process that has come, with its number; None: none may be given yet."""
        if not self.is_elected():
            return None
        candidacy = self.candidacy
        assert candidacy is not None
        number = candidacy.ballot.term * _NUMBERS_PER_TERM + candidacy.entered
        candidacy.entered += 1
        member = Member(number, slot, host)
        self.entrants[number] = member
        self.since_s[number] = now_s
        return member

    def hear(self, number: int) -> None:
        """Note a sign of life of a member."""
        self.silent_s.pop(number, None)

    def miss(self, number: int, now_s: float) -> None:
        """Note that a member gives no sign of life where there should be one."""
        self.silent_s.setdefault(number, now_s)

    def see(self, record: Record) -> None:
        """Take from a record, its own or another's, what terms, epochs and worlds there are.

        Every member sends its record with its signs of life, or a coordinator may not know that
        another one was there meanwhile.
        """
        candidacy = self.candidacy
        term = record.promised.term
        self.top_term = max(self.top_term, term)
        if (
            candidacy is not None
            and term >= candidacy.ballot.term
            and record.promised != candidacy.ballot
        ):
            self._deposed = True
        for world in (record.formed, record.agreed):
            if world is not None:
                self.top_epoch = max(self.top_epoch, world.epoch)
        if record.formed is not None:
            self._see_world(record.formed)

    def stand(self, ballot: Ballot) -> None:
        """Begin under a ballot that `decide` has named."""
        if self.candidacy is None or self.candidacy.ballot != ballot:
            self.top_term = max(self.top_term, ballot.term)
            self.candidacy = Candidacy(ballot)
            self._deposed = False

    def promised(self, number: int, record: Record) -> None:
        """Take a member's answer to `Ask`, a promise or not. The first one counts."""
        self.see(record)
        candidacy = self.candidacy
        if candidacy is not None and record.promised == candidacy.ballot:
            candidacy.answers.setdefault(number, record)

    def prepare(self, world: World, now_s: float) -> None:
        """Begin with a preparation that `decide` has named, or go on with it. Before asking."""
        candidacy = self.candidacy
        assert candidacy is not None
        if candidacy.preparation is None or candidacy.preparation.world is not world:
            candidacy.preparation = Preparation(world, now_s)
            self.top_epoch = max(self.top_epoch, world.epoch)

    def prepared(self, number: int, stamp: Stamp, works: bool) -> None:
        """A member has formed the engine of that world, or could not."""
        preparation = None if self.candidacy is None else self.candidacy.preparation
        if preparation is not None and preparation.world.stamp == stamp:
            if works:
                preparation.works.add(number)
            else:
                preparation.has_failed = True

    def propose(self, world: World, numbers: Collection[int], urgent: bool, reason: str) -> None:
        """Begin with a proposal that `decide` has made, or go on with it. Before asking."""
        candidacy = self.candidacy
        assert candidacy is not None
        if candidacy.proposal is not world:
            candidacy.proposal, candidacy.agreed = world, set()
            candidacy.excused = self._without_record()
            candidacy.silent = frozenset(self.silent_s)
            self.top_epoch = max(self.top_epoch, world.epoch)
        candidacy.urgent, candidacy.reason = urgent, reason
        candidacy.asked.update(numbers)

    def agreed(self, number: int, stamp: Stamp, record: Record) -> None:
        """Take a member's answer to `Propose`: it has agreed if its record says so."""
        self.see(record)
        candidacy = self.candidacy
        if candidacy is None or candidacy.proposal is None or candidacy.proposal.stamp != stamp:
            return
        if record.agreed is not None and record.agreed.stamp == stamp:
            candidacy.agreed.add(number)

    def declare(self, world: World, now_s: float) -> None:
        """A proposal has formed. Its members need not be asked for promises again."""
        candidacy = self.candidacy
        assert candidacy is not None
        record = Record(candidacy.ballot, world, world)
        candidacy.answers = dict.fromkeys(world.numbers, record)
        candidacy.proposal, candidacy.asked, candidacy.preparation = None, set(), None
        self._see_world(world)
        self.formed_s = now_s

    # What follows.

    def line(self) -> Line:
        """Return the end of the line of worlds."""
        candidacy = self.candidacy
        answers = {} if candidacy is None else candidacy.answers
        own = Ballot(-1, 0) if candidacy is None else candidacy.ballot
        return line_of(self.formed, answers, self.proofs, own)

    def is_elected(self, line: Line | None = None) -> bool:
        """Return whether enough members have promised that this coordinator may propose."""
        if self.candidacy is None or self._deposed:
            return False
        answers = self.candidacy.answers
        basis = (line or self.line()).basis
        return all(has_quorum(world, answers.keys(), self.proofs) for world in basis)

    def next_ballot(self, coordinator: int) -> Ballot:
        """Return the ballot under which it stands: its own while nobody has a later one."""
        if self.candidacy is not None and not self._deposed:
            return self.candidacy.ballot
        return Ballot(self.top_term + 1, coordinator)

    def gone(self, silence_s: float, now_s: float) -> set[int]:
        """Return the members of which nothing was heard for so long."""
        return {n for n, since_s in self.silent_s.items() if now_s - since_s >= silence_s}

    def stands(self, proposal: World, line: Line, gone: Collection[int]) -> bool:
        """Return whether a proposal may still form, and is still the right one to wait for."""
        candidacy = self.candidacy
        return (
            candidacy is not None
            and [w.stamp for w in proposal.basis] == [w.stamp for w in line.basis]
            and not proposal.numbers & self.proofs.keys()
            and not proposal.numbers.intersection(gone)
            and candidacy.excused == self._without_record()
            and not (proposal.joined == proposal.numbers and proposal.numbers & self.has_state)
        )

    def _without_record(self) -> frozenset[int]:
        return frozenset(n for n, proof in self.proofs.items() if proof.record is None)

    def _see_world(self, world: World) -> None:
        self.top_epoch = max(self.top_epoch, world.epoch)
        self.top_term = max(self.top_term, world.ballot.term)
        if world.stamp > self.formed.stamp:
            left = self.formed.numbers.difference(world.numbers, self.proofs, self.leaving)
            if self.candidacy is not None and world.ballot == self.candidacy.ballot:
                left &= self.candidacy.silent
            self.left_behind |= left
            self.formed, self.formed_s = world, None
            if self.candidacy is not None and self.candidacy.ballot.term < world.ballot.term:
                self._deposed = True
        if self.entrants:
            for number in world.numbers:
                self.entrants.pop(number, None)

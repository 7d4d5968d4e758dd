"""The rules by which members agree to a world, which keep a job from parting in two.

Worlds follow each other in one line. A *coordinator* proposes the next one, and whoever can reach
enough voters may be one: there is no lease and no clock in what follows, only numbers that grow.

1.  *Ballots.* A coordinator works under a ballot (term, its own number). It takes a term above all
    that it has seen, and asks for promises. A member promises a term to one coordinator only, and
    never an older one; it answers with its record.
2.  *Agreeing.* A member agrees to a proposal unless it has promised a later ballot, the same term
    to another coordinator, or agreed to a later proposal. This is a promise, too. From then on it
    works in no older world. It writes promise and agreement into its record before it sends them,
    and that it was told of a world before it works there.
3.  *Proof of death* carries the record that the dead process left. A dead voter whose record is
    known is as good as one that has promised: it will never agree to anything else. So a majority
    is taken of the others; but a coordinator whose ballot it would refuse must take a later one.
    Silence proves nothing. A death without a record proves only that no newer world has it.
4.  *Quorum* of a world: more than half of its voters that are left by rule 3; of exactly half, the
    side that has the lowest rank. Voters are the world's members; who joins does not vote.
    A world on one host knows no partitions, so all of its voters that are not proven dead must
    vote, and a death without a record suffices there if it was known before the question.
5.  *Basis.* Before it proposes, a coordinator has the promises of a quorum of the newest world
    known as formed, and of each later proposal that a record agrees to: this may have formed
    without the coordinator's knowledge. Its proposal names these worlds, its basis. Left out are
    the coordinator's own proposals, and those of which a member is known never to agree.
6.  *Forming.* A proposal has formed when its coordinator, still without a later ballot in sight,
    has found that all of its members have agreed, and a quorum of each world of the basis, and that
    the basis is what rule 5 asks for. Only then is anyone told, and works there.
7.  *Epochs.* A proposal's epoch is above all epochs that the coordinator has seen.

Why one line: let F have formed, and P be proposed later in the order of ballots. Going along the
worlds that P's coordinator knows, take the last one that F follows. P's promises and F's agreements
there have a voter in common, living or dead (rule 4): two quorums that had none would each have to
be at most the half that the other left over, and the lowest rank decides then. It agreed to F, or
to what led to F, before it promised, or F's coordinator had not had its vote. So P's coordinator
has seen that, and it is in the basis; the argument goes on from there, until F itself is reached.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

__all__ = [
    "NOTHING",
    "Ballot",
    "Line",
    "Member",
    "Proof",
    "Record",
    "Stamp",
    "World",
    "has_quorum",
    "line_of",
    "voters_left",
]


class Ballot(NamedTuple):
    """The number under which a coordinator asks: no two coordinators ever have the same."""

    term: int
    coordinator: int
    """Its member number; of a launcher a negative number."""


class Stamp(NamedTuple):
    """A number that says which of two proposals is later; no two have the same."""

    ballot: Ballot
    epoch: int


@dataclass(frozen=True)
class Member:
    """A process of a job. Whoever is started again is another one, with the same slot."""

    number: int
    """Grows with every process that enters, and is never used twice."""
    slot: int
    """The place that it fills, as its launcher or scheduler counts them."""
    host: str


@dataclass(frozen=True)
class World:
    """A world that has formed or may form. Its ranks are the places in ``members``."""

    ballot: Ballot
    epoch: int
    members: tuple[Member, ...]
    """Survivors keep their order, and joiners come last: their numbers need not be the highest,
    since a process may have got its own long ago, from a coordinator that was cut off."""
    basis: tuple[World, ...] = ()
    """The worlds of each of which it needs a quorum; the first has formed. They are without a basis
    here."""
    joined: frozenset[int] = frozenset()
    """Numbers of the members that bring no state with them, as far as the coordinator knew."""
    resets: int = 0
    """How many worlds there were before it, proposals that may have formed included."""

    @cached_property
    def stamp(self) -> Stamp:
        """Its place among all proposals."""
        return Stamp(self.ballot, self.epoch)

    @cached_property
    def numbers(self) -> frozenset[int]:
        """The numbers of its members."""
        return frozenset(member.number for member in self.members)

    @cached_property
    def is_on_one_host(self) -> bool:
        """True if no partition can come between its members."""
        return len({member.host for member in self.members}) == 1

    def without_basis(self) -> World:
        """Return the world without its basis, as others name it in theirs."""
        return replace(self, basis=()) if self.basis else self

    def announcement(self, reason: str) -> str:
        """Return what users hear when it has formed."""
        return f"epoch {self.epoch}: {len(self.members)} ranks go on, since {reason}"

    def name(self, number: int) -> str:
        """Return a member's name for users: "rank 2 on host b"."""
        for rank, member in enumerate(self.members):
            if member.number == number:
                return f"rank {rank} on host {member.host}"
        return f"member {number}"


@dataclass(frozen=True)
class Record:
    """A member's promise, its agreement, and the newest world that it was told of.

    It stands where whoever reports the member's end can read it, and changes there first.
    """

    promised: Ballot
    formed: World | None = None
    """The newest world that it was told has formed."""
    agreed: World | None = None
    """The latest proposal that it has agreed to; it counts what has formed as well."""

    def promise(self, ballot: Ballot) -> Record | None:
        """Return the record with a promise to refuse older ballots; None: this one is refused."""
        if ballot == self.promised:
            return self
        return replace(self, promised=ballot) if ballot.term > self.promised.term else None

    def agree(self, world: World) -> Record | None:
        """Return the record with the agreement to ``world``; None: it is refused.

        The members of ``world`` work in no older one from then on.
        """
        promise = self.promise(world.ballot)
        if promise is None:
            return None
        if self.agreed is not None and world.stamp <= self.agreed.stamp:
            return self if world.stamp == self.agreed.stamp else None
        return replace(promise, agreed=world)

    def told(self, formed: World) -> Record:
        """Return the record with ``formed`` as the newest world, unless a newer one is known."""
        if self.formed is not None and self.formed.stamp >= formed.stamp:
            return self
        return replace(self, formed=formed)

    def works_in(self, number: int) -> World | None:
        """Return the world in which the member of that number may work now, if there is any."""
        world = self.formed
        if world is None or number not in world.numbers:
            return None
        return world if self.agreed is None or self.agreed.stamp <= world.stamp else None


NOTHING = Record(Ballot(-1, -1))
"""The record of a process that has just entered."""


@dataclass(frozen=True)
class Proof:
    """A statement that a member has ended, by who can know: a pidfd, an agent, a scheduler."""

    number: int
    cause: str
    """For messages: "killed by SIGKILL"."""
    record: Record | None = None
    """The record that it left. None: nobody could read it."""
    has_finished: bool = False
    """It has ended by itself, with exit code 0."""


Proofs = Mapping[int, Proof]


def voters_left(world: World, proofs: Proofs) -> set[int]:
    """Return the voters of whom a majority is taken: all but the dead that speak by their record.

    On one host: but all the dead.
    """
    return {
        number
        for number in world.numbers
        if (proof := proofs.get(number)) is None
        or (proof.record is None and not world.is_on_one_host)
    }


def has_quorum(
    world: World, voted: Collection[int], proofs: Proofs, excused: Collection[int] | None = None
) -> bool:
    """Return whether ``voted`` decide for ``world``; the caller makes sure no proof outvotes them.

    ``excused``: the members that were dead without a record when the question was put; None: all
    that are known to be so. A world of which no voter is left has a quorum: all that it can say is
    known.
    """
    left = voters_left(world, proofs)
    if world.is_on_one_host:
        if excused is not None:
            left |= {
                number
                for number in world.numbers & proofs.keys()
                if proofs[number].record is None and number not in excused
            }
        return left.issubset(voted)
    if not left:
        return True
    votes = len(left.intersection(voted))
    lowest = next(member.number for member in world.members if member.number in left)
    return 2 * votes > len(left) or (2 * votes == len(left) and lowest in voted)


@dataclass(frozen=True)
class Line:
    """The end of the line of worlds, as far as records tell."""

    formed: World
    """The newest world that is known to have formed."""
    open: tuple[World, ...]
    """Later proposals that may have formed, too, by their stamps."""
    basis: tuple[World, ...] = field(default=())
    """The worlds of each of which the next one needs a quorum; the first has formed."""
    stopped: bool = False
    """A voter has agreed to a later proposal, so the newest world works no more."""
    lost: bool = False
    """No member of the newest world lives."""
    idle: bool = False
    """The newest world is lost, but never made a step, since a member was not told that it had
    formed."""
    ended: bool = False
    """The newest world is lost, and nobody of the world before it can go on in its place."""


def line_of(formed: World, answers: Mapping[int, Record], proofs: Proofs, own: Ballot) -> Line:
    """Return the end of the line of worlds.

    ``formed``: the newest world known otherwise; ``answers``: records of the living by number, as
    they were when they promised ``own``, the coordinator's ballot.
    """
    records = dict(answers)
    records.update({n: proof.record for n, proof in proofs.items() if proof.record is not None})
    for record in records.values():
        if record.formed is not None and record.formed.stamp > formed.stamp:
            formed = record.formed
    found: dict[Stamp, World] = {}
    for record in records.values():
        if record.agreed is not None and record.agreed.stamp > formed.stamp:
            for world in (record.agreed, *record.agreed.basis):
                if world.stamp > formed.stamp and world.ballot != own:
                    found[world.stamp] = world
    for stamp in sorted(found, reverse=True):
        if _can_have_worked_unseen(found[stamp], proofs):
            formed = found[stamp]
            break
    may_have = sorted(
        (world for world in found.values() if world.stamp > formed.stamp), key=lambda w: w.stamp
    )
    still_open = tuple(w.without_basis() for w in may_have if not _is_denied(w, records))
    if any(number not in proofs for number in formed.numbers):
        stopped = any(
            record.agreed is not None and record.agreed.stamp > formed.stamp
            for record in answers.values()
        )
        return Line(formed, still_open, (formed.without_basis(), *still_open), stopped)
    return _after_loss(formed, still_open, proofs)


def _is_denied(world: World, records: Mapping[int, Record]) -> bool:
    """Return whether a member of ``world`` has not agreed to it, and never will.

    Its promise or its death says so.
    """
    return any(
        record.agreed is None or record.agreed.stamp < world.stamp
        for number in world.numbers
        if (record := records.get(number)) is not None
    )


def _can_have_worked_unseen(world: World, proofs: Proofs) -> bool:
    """Return whether all its members are dead, and no record says that one was never told of it.

    It takes all members to make a step.
    """
    return all(
        (proof := proofs.get(number)) is not None and proof.record is None
        for number in world.numbers
    )


def _after_loss(formed: World, still_open: tuple[World, ...], proofs: Proofs) -> Line:
    """Return the line's end where nobody of ``formed`` lives: those of the world before may decide.

    All records must be known: a death without one may hide a world after ``formed`` that lives.
    """
    before = tuple(world for world in formed.basis if voters_left(world, proofs))
    hidden = any(proofs[number].record is None for number in formed.numbers)
    ended = hidden or formed.basis[:1] != before[:1] or not before
    basis = (*before, formed.without_basis(), *still_open)
    records = [proofs[number].record for number in formed.numbers]
    idle = any(
        r is not None and (r.formed is None or r.formed.stamp < formed.stamp) for r in records
    )
    return Line(formed, still_open, basis, lost=True, idle=idle, ended=ended)

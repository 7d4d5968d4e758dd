"""The rules by which ranks share an epoch's parts, whose lengths nobody knows before their end.

Everything here is a pure function of values that all ranks have, so all ranks work out the same.

A rank **holds** at most one part, and takes one batch of it in each step. Which part is whose does
not change while both are there: its loader may have worker processes, and has read ahead. A part is
free before somebody has begun it, and again when who held it is gone; the free part with the lowest
number goes to the first rank that holds none. So the parts of a rank that has come, or of one that
was lost, need no other rule.

What a step takes all ranks learn from one **round** of reports: which part a rank holds, and how
many samples the batch has that it has read, or that the part is at its end. Where a part is, or a
rank was lost, others get new parts, and another round follows, until each has a batch or no part is
free. A batch counts when the step does in which it was combined; until then nobody knows that it
was read, so whoever gets the part of a lost rank reads it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kolovod.elastic.sampling_exchange import Said
from kolovod.errors import ElasticArgumentError, MismatchError

__all__ = ["Part", "Report", "Snapshot", "StreamProgress", "StreamStep"]


@dataclass(frozen=True)
class Snapshot:
    """The state of a part's loader, which all ranks know."""

    batches: int
    """How many the loader had given when it was in this state; all of them have counted."""
    state: Any = field(repr=False, compare=False)
    """Nobody changes it: whoever loads it gives a copy to the loader."""


@dataclass(frozen=True)
class Part:
    """The progress of a part."""

    batches: int = 0
    """Batches that have counted: the first ones of the part."""
    samples: int = 0
    """The number of samples in these."""
    has_ended: bool = False
    snapshot: Snapshot | None = None


class Report(NamedTuple):
    """The facts that a rank reports before a step."""

    member: int
    at: tuple[int, int, int]
    """The number of parts, the epoch, and how many steps of it are done: alike on all ranks."""
    part: int | None
    """The part that it holds; None: none."""
    samples: int | None = None
    """The number of samples in the batch that it has read; None: the part is at its end."""
    snapshot: Snapshot | None = None
    """The state of its loader before that batch, now and then."""


@dataclass(frozen=True)
class StreamStep:
    """The batches of a step."""

    taken: Mapping[int, tuple[int, int]]
    """The part of which each member takes a batch, and how many samples that has."""
    members: tuple[int, ...]
    """Whose gradients make the step's average: also those that have no batch of their own."""

    @property
    def samples(self) -> int:
        """The number of samples of all ranks together."""
        return sum(samples for _, samples in self.taken.values())

    def weight(self, member: int) -> float:
        """Return the factor for a member's mean loss.

        With it the average over ``members`` is the mean over the step's samples.
        """
        _, samples = self.taken.get(member, (0, 0))
        return samples * len(self.members) / self.samples if self.samples else 0.0

    def correction(self, members: Collection[int]) -> float:
        """Return the factor for the average over ``members`` only, if others have been lost."""
        theirs = sum(samples for who, (_, samples) in self.taken.items() if who in members)
        ranks = sum(member in members for member in self.members)
        return ranks * self.samples / (len(self.members) * theirs) if theirs else 1.0


@dataclass(frozen=True)
class StreamProgress:
    """The progress of an epoch: all ranks have the same after each step, and each round."""

    epoch: int
    steps_done: int
    parts: tuple[Part, ...]
    members: tuple[int, ...] = ()
    """Their numbers by rank: no two processes of a job ever have the same."""
    held: tuple[tuple[int, int], ...] = ()
    """Pairs of a member and the part that it holds."""
    idle: tuple[int, ...] = ()
    """Members that have no samples in the step at hand, or in the next epoch's first."""

    @property
    def is_over(self) -> bool:
        """True if all parts are known to be at their ends."""
        return all(part.has_ended for part in self.parts)

    @property
    def at(self) -> tuple[int, int, int]:
        """The place where all ranks must be, as reports have it."""
        return len(self.parts), self.epoch, self.steps_done

    def part_of(self, member: int) -> int | None:
        """Return the part that a member holds; None: none."""
        return dict(self.held).get(member)

    def begin(self, epoch: int) -> StreamProgress:
        """Return the beginning of another epoch among the same members."""
        fresh = tuple(Part() for _ in self.parts)
        return replace(self, epoch=epoch, steps_done=0, parts=fresh, held=()).dealt()

    def dealt(self) -> StreamProgress:
        """Return the progress with free parts given to members that hold none."""
        held = dict(self.held)
        without = [who for who in self.members if who not in held and who not in self.idle]
        if not without:
            return self
        taken = set(held.values())
        free = (
            number
            for number, part in enumerate(self.parts)
            if not part.has_ended and number not in taken
        )
        held.update(zip(without, free, strict=False))
        return replace(self, held=tuple(held.items()))

    def change(
        self, members: Sequence[int], said: Mapping[int, Said], *, takes_part: bool = True
    ) -> StreamProgress:
        """Return the progress of the same epoch among ``members``.

        Parts of those that are gone are free. ``takes_part``: False says that those which were not
        there before are idle.
        """
        new = set() if takes_part else set(members) - set(self.members)
        idle = tuple(member for member in members if member in self.idle or member in new)
        return self._among(members, idle).dealt()

    def _among(self, members: Sequence[int], idle: tuple[int, ...]) -> StreamProgress:
        held = tuple(pair for pair in self.held if pair[0] in members)
        if set(idle) == set(members):  # else nobody would take anything
            idle = ()
        return replace(self, members=tuple(members), held=held, idle=idle)

    def heard(self, reports: Sequence[Report]) -> tuple[StreamProgress, StreamStep | None]:
        """Return the progress after a round, and the step; None: another round is needed.

        A step in which nobody has a batch says that the epoch is over. Raises MismatchError, on all
        ranks, for reports that do not fit together.
        """
        self._check(reports)
        present = [report.member for report in reports]
        now = self._among(present, tuple(member for member in self.idle if member in present))
        held, parts = dict(now.held), list(now.parts)
        taken: dict[int, tuple[int, int]] = {}
        for member, _, number, samples, snapshot in reports:
            if number is None:
                continue
            if snapshot is not None:
                parts[number] = replace(parts[number], snapshot=snapshot)
            if samples is None:
                parts[number] = replace(parts[number], has_ended=True, snapshot=None)
                del held[member]
            else:
                taken[member] = number, samples
        now = replace(now, parts=tuple(parts), held=tuple(held.items())).dealt()
        if any(member not in taken for member, _ in now.held):
            return now, None
        return now, StreamStep(taken, tuple(who for who in present if who not in now.idle))

    def _check(self, reports: Sequence[Report]) -> None:
        first = reports[0]
        for rank, report in enumerate(reports):
            if report.at != first.at:
                raise MismatchError(
                    f"rank {rank}'s stream is at {_place(report)}, but rank 0's at {_place(first)}:"
                    " is it the same stream, and each step recorded, on all ranks?"
                )
            if report.part != self.part_of(report.member):
                raise MismatchError(
                    f"rank {rank} (member {report.member}) reads part {report.part} of a stream at "
                    f"{_place(report)}, but it was dealt part {self.part_of(report.member)}: has "
                    "the same state been loaded on all ranks?"
                )

    def record(self, step: StreamStep, members: Collection[int] | None = None) -> StreamProgress:
        """Return the progress after a step in which the samples of ``members`` (None: all) counted.

        Raises InvalidArgumentError for a member that was not in the step.
        """
        if strangers := set(members or ()) - set(self.members):
            raise ElasticArgumentError(
                f"members is {sorted(members or ())}, but {sorted(strangers)} had no part in this "
                f"step: it was shared among {sorted(self.members)}"
            )
        parts = list(self.parts)
        for member, (number, samples) in step.taken.items():
            if members is None or member in members:
                part = parts[number]
                parts[number] = replace(
                    part, batches=part.batches + 1, samples=part.samples + samples
                )
        after = replace(self, steps_done=self.steps_done + 1, parts=tuple(parts), idle=())
        return after.dealt()


def _place(report: Report) -> str:
    parts, epoch, steps = report.at
    return f"step {steps} of epoch {epoch}, of {parts} parts"

"""The rules by which ranks share an epoch's samples, also when ranks come and go.

Everything here is a pure function of values that all ranks have, so all ranks work out the same.

An epoch's samples are known by their **position** in the epoch's order. A ``Plan`` says what each
rank takes in each step among certain members: first what it had drawn before the plan was made (its
loader has these batches already, and gives them out whatever we say), then its part of the pool,
which the steps take from the front. So what a step takes is one piece of the pool but for the first
few steps, and what is left is a few ranges of positions however large the dataset is.

Every rank has a batch in every step, so nobody waits. Where there are fewer samples than that, a
batch repeats samples: with ``pad`` so many that all are equally long; else a rank that has no
sample of its own repeats one, which has no weight in the average. An empty batch would do as well,
but loaders and models fail on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from kolovod.elastic.positions import Span, Spans, count, cut, minus, normal
from kolovod.elastic.sampling_exchange import Said
from kolovod.elastic.speeds import is_due, shares_of, split
from kolovod.errors import ElasticArgumentError

__all__ = ["Batch", "Plan", "Progress", "Rules", "global_batch"]


def global_batch(samples: int, size: int, most_per_rank: int) -> tuple[int, int]:
    """Compute how ``size`` ranks take ``samples`` per optimizer step.

    A rank takes at most ``most_per_rank`` at a time. Returns how many passes each rank makes, as
    few as possible, and how many samples a rank has in a pass; where these do not come to
    ``samples`` exactly, some have one less. Raises InvalidArgumentError for a number below one.
    """
    for name, value in (("samples", samples), ("size", size), ("most_per_rank", most_per_rank)):
        if value < 1:
            raise ElasticArgumentError(f"{name} is {value}: need at least 1")
    passes = -(-samples // (size * most_per_rank))
    return passes, -(-samples // (size * passes))


@dataclass(frozen=True)
class Rules:
    """The settings that the ranks of a job have agreed on by their script."""

    length: int
    """Samples in the dataset."""
    batch_size: int
    """Samples per rank and pass; with ``samples_per_step`` the most."""
    pad: bool
    samples_per_step: int | None = None
    """Samples of all ranks together, if that does not depend on how many ranks there are."""
    by_speed: bool = False
    """True if a rank's part of them follows its speed."""

    def check(self) -> None:
        """Raise InvalidArgumentError for values that cannot work."""
        if self.batch_size < 1:
            raise ElasticArgumentError(f"batch_size is {self.batch_size}: need at least 1")
        if self.samples_per_step is None:
            if self.by_speed:
                raise ElasticArgumentError(
                    f"by_speed is {self.by_speed} and samples_per_step None: give the samples of a "
                    "step of all ranks, which are shared by speed"
                )
            return
        if self.samples_per_step < 1:
            raise ElasticArgumentError(
                f"samples_per_step is {self.samples_per_step}: need at least 1"
            )
        if self.pad:
            raise ElasticArgumentError(
                f"samples_per_step is {self.samples_per_step} and pad is set, which would add "
                "samples to steps: give pad=False"
            )


@dataclass(frozen=True)
class Batch:
    """The samples that a rank takes in a pass."""

    own: Spans
    """Samples that nobody else takes in this epoch."""
    repeats: tuple[int, ...] = ()
    """Positions of samples that somebody takes anyway."""
    counts: bool = True
    """False: none of its samples do, not even where repeats have a weight."""

    @property
    def positions(self) -> list[int]:
        """All, in the order in which the rank takes them."""
        return [*(at for start, stop in self.own for at in range(start, stop)), *self.repeats]


@dataclass(frozen=True)
class Plan:
    """The samples that each of ``members`` takes until the next change."""

    rules: Rules
    members: tuple[int, ...]
    """Their numbers by rank: no two processes of a job ever have the same."""
    kept: tuple[tuple[Batch, ...], ...]
    """The batches that each has drawn before, and takes first."""
    pool: Spans
    shares: tuple[int, ...] = ()
    """The parts of a step's samples that ranks have, in proportion; (): equal ones."""

    @property
    def shares_by_member(self) -> dict[int, int]:
        """``shares``, by the members' numbers; {}: equal ones."""
        return dict(zip(self.members, self.shares, strict=True)) if self.shares else {}

    @cached_property
    def passes(self) -> int:
        """Batches that each rank takes in a step."""
        samples = self.rules.samples_per_step
        if samples is None or not self.members:
            return 1
        return global_batch(samples, len(self.members), self.rules.batch_size)[0]

    @cached_property
    def samples(self) -> int:
        """The number of samples that a step takes from the pool where nobody has kept anything."""
        return self.rules.samples_per_step or self.rules.batch_size * max(len(self.members), 1)

    @cached_property
    def steps(self) -> int:
        """The number of steps of the plan."""
        left = count(self.pool) - self._head_takes
        return len(self._head) + -(-left // self.samples)

    @cached_property
    def batches(self) -> int:
        """The number of batches of each rank."""
        return self.steps * self.passes

    @cached_property
    def _slots(self) -> int:
        return self.passes * max(len(self.members), 1)

    @cached_property
    def _head(self) -> list[list[int]]:
        """The samples that each slot takes from the pool in the steps that have kept batches.

        A batch is shorter than the rules say only where no further step follows, as far as that can
        be: else it has none of the pool. A loader that cuts the stream of indices by itself would
        cut a shorter batch elsewhere.
        """
        most, total = self.rules.batch_size, count(self.pool)
        longest = max((len(batches) for batches in self.kept), default=0)
        head: list[list[int]] = []
        while len(head) * self.passes < longest:
            first, left = len(head) * self.passes, total - sum(map(sum, head))
            kept = [self._kept(slot, first) for slot in range(self._slots)]
            free = [slot for slot, batch in enumerate(kept) if batch is None]
            has = sum(self._weight(batch) for batch in kept if batch is not None)
            due = max(0, min(len(free) * most, self.samples - has))
            takes = [0] * self._slots
            if left < due and first + self.passes < longest:
                for slot in free[: left // most]:
                    takes[slot] = most
            else:
                for slot, take in zip(free, self._split(min(left, due), free), strict=True):
                    takes[slot] = take
            head.append(takes)
        return head

    @cached_property
    def _head_offsets(self) -> list[int]:
        return list(accumulate(map(sum, self._head), initial=0))

    @cached_property
    def _head_takes(self) -> int:
        return self._head_offsets[-1]

    @cached_property
    def _pool_offsets(self) -> list[int]:
        return list(accumulate((stop - start for start, stop in self.pool), initial=0))

    def _kept(self, slot: int, first: int) -> Batch | None:
        """Return the kept batch of ``slot`` in the step whose first batch is the ``first``-th.

        None: the slot has kept none there.
        """
        number, rank = divmod(slot, max(len(self.members), 1))
        batches = self.kept[rank] if self.kept else ()
        return batches[first + number] if first + number < len(batches) else None

    def _weight(self, batch: Batch) -> int:
        if not batch.counts:
            return 0
        return count(batch.own) + (len(batch.repeats) if self.rules.pad else 0)

    def _offset(self, step: int) -> int:
        """Return the place in the pool from which a step takes."""
        if step < len(self._head):
            return self._head_offsets[step]
        whole = self._head_takes + (step - len(self._head)) * self.samples
        return min(whole, count(self.pool))

    def _takes(self, step: int) -> list[int]:
        """Return how many samples of the pool each slot takes in a step."""
        if step < len(self._head):
            return self._head[step]
        return self._split_among_all(self._offset(step + 1) - self._offset(step))

    def _split_among_all(self, total: int) -> list[int]:
        """Do as ``_split`` does for all slots: the same for nearly all steps."""
        if total not in self._splits:
            self._splits[total] = self._split(total, range(self._slots))
        return self._splits[total]

    @cached_property
    def _splits(self) -> dict[int, list[int]]:
        return {}

    def _split(self, total: int, slots: Sequence[int]) -> list[int]:
        """Return how ``total`` samples are shared among ``slots``, by the shares of their ranks."""
        if not self.shares:
            share, more = divmod(total, max(len(slots), 1))
            return [share + (at < more) for at in range(len(slots))]
        shares = [self.shares[slot % len(self.members)] for slot in slots]
        return split(total, shares, self.rules.batch_size)

    def weights(self, step: int) -> list[int]:
        """Return how many samples count in each slot of a step: by pass, and in each by rank."""
        sizes = self._takes(step)
        if step < len(self._head):
            kept = [self._kept(slot, step * self.passes) for slot in range(self._slots)]
        else:
            kept = [None] * self._slots
        sizes = [
            takes if batch is None else self._weight(batch)
            for takes, batch in zip(sizes, kept, strict=True)
        ]
        if self.rules.pad:
            longest = max(sizes)
            sizes = [
                longest if batch is None else size for size, batch in zip(sizes, kept, strict=True)
            ]
        return sizes

    def batch(self, rank: int, number: int) -> Batch:
        """Return the ``number``-th batch of a rank, counted from the beginning of the plan."""
        step, part = divmod(number, self.passes)
        slot = part * len(self.members) + rank
        kept = self._kept(slot, step * self.passes)
        if kept is not None:
            return kept
        takes = self._takes(step)
        start = self._offset(step) + sum(takes[:slot])
        own = cut(self.pool, self._pool_offsets, start, start + takes[slot])
        wanted = self.weights(step)[slot] if self.rules.pad else max(takes[slot], 1)
        extra = wanted - takes[slot]
        repeats = tuple((slot + k * self._slots) % self.rules.length for k in range(extra))
        return Batch(own, repeats)

    def remaining(self, counted: Sequence[int]) -> Spans:
        """Return the samples that have counted in no step.

        ``counted``: for each rank, in how many of the first steps its samples did. Steps that all
        ranks had need no look: with them the pool is taken from the front.
        """
        base = min(counted, default=0)
        left = list(cut(self.pool, self._pool_offsets, self._offset(base), count(self.pool)))
        gone: list[Span] = []
        for batches in self.kept:
            for batch in batches[base * self.passes :]:
                left += batch.own
        for rank, steps in enumerate(counted):
            for number in range(base * self.passes, steps * self.passes):
                gone += self.batch(rank, number).own
        return minus(normal(left), normal(gone))


@dataclass(frozen=True)
class Progress:
    """The progress of an epoch.

    All ranks have the same after each step, by an exact comparison.
    """

    epoch: int
    before: int
    """Steps of the epoch that were done before the plan was made."""
    plan: Plan
    done: int = 0
    """Steps of the plan."""
    counted: tuple[int, ...] = ()
    """The number of these steps in which each rank's samples counted: fewer where it was lost."""
    idle: tuple[int, ...] = ()
    """Members that have no samples in the step at hand, or in the next epoch's first."""
    settled: int = 0
    """Steps since other ranks, or other shares, were agreed on: in earlier epochs, too."""

    @staticmethod
    def begin(rules: Rules, epoch: int, before: int = 0, left: Spans | None = None) -> Progress:
        """Begin an epoch, of which ``left`` is to be done; nobody takes anything yet."""
        pool = normal([(0, rules.length)]) if left is None else left
        return Progress(epoch, before, Plan(rules, (), (), pool))

    @property
    def steps_done(self) -> int:
        """The number of steps of the epoch that are done."""
        return self.before + self.done

    @property
    def steps_left(self) -> int:
        """The number of steps of the epoch that are left, if nothing changes."""
        return self.plan.steps - self.done

    @property
    def has_lost(self) -> bool:
        """True if a rank of the plan has been lost, and its samples wait for a change."""
        return min(self.counted, default=0) < self.done

    def left(self) -> Spans:
        """Return the samples that have not counted yet."""
        return self.plan.remaining(self.counted)

    def record(self, members: Collection[int] | None = None) -> Progress:
        """Return the progress after a step in which the samples of ``members`` (None: all) counted.

        Those of a member that missed an earlier step do not: who was lost does not come back.
        Raises InvalidArgumentError if there is no such step, or for a member that the plan lacks.
        """
        if not self.steps_left:
            raise ElasticArgumentError(
                f"a step is recorded after all {self.steps_done} steps of epoch {self.epoch}: "
                "set_epoch begins the next one"
            )
        known = self.plan.members
        who = set(known if members is None else members)
        if strangers := who - set(known):
            raise ElasticArgumentError(
                f"members is {sorted(who)}, but {sorted(strangers)} had no samples in this step: "
                f"it was shared among {sorted(known)}"
            )
        counted = tuple(
            steps + (member in who and steps == self.done)
            for member, steps in zip(known, self.counted, strict=True)
        )
        done, settled = self.done + 1, self.settled + 1
        return Progress(self.epoch, self.before, self.plan, done, counted, settled=settled)

    def change(
        self,
        members: Sequence[int],
        said: Mapping[int, Said],
        *,
        takes_part: bool = True,
        before: Mapping[int, int] | None = None,
    ) -> Progress:
        """Return the progress of the same epoch among ``members``.

        ``said``: by members, of those that were in the plan at least. Batches that one has drawn
        and not done stay its own. All else is shared anew, by the speeds that they say if the rules
        are so: then the progress is this one where only these were asked for, and nothing is to be
        changed. ``takes_part``: False says that a member that was not in the plan is idle.
        ``before``: the members' shares until now; None: those of the plan.
        """
        shares: dict[int, int] = {}
        if self.plan.rules.by_speed:
            speeds = {member: each.speed for member, each in said.items()}
            until_now = self.plan.shares_by_member if before is None else before
            shares = shares_of(speeds, members, until_now)
            if self._stays(members, shares):
                return self
        plan, first = self.plan, self.done * self.plan.passes
        held: dict[int, tuple[Batch, ...]] = {}
        for rank, member in enumerate(plan.members):
            if member in members:
                until = min(said.get(member, Said()).drawn, plan.batches)
                held[member] = tuple(plan.batch(rank, number) for number in range(first, until))
        idle = tuple(
            member
            for member in members
            if member in self.idle or not (takes_part or member in plan.members)
        )
        by_rank = tuple(shares[member] for member in members) if shares else ()
        new = Plan(plan.rules, tuple(members), (), (), by_rank)
        for member in idle:
            held[member] = _without_weight(held.get(member, ()), new.passes)
        taken = [span for batches in held.values() for batch in batches for span in batch.own]
        pool = minus(self.left(), normal(taken))
        if pool or any(held.values()):  # else no step follows in this epoch
            instead = Batch((), (0,), counts=False)
            for member in idle:
                held[member] += (instead,) * (new.passes - len(held[member]))
        kept = tuple(held.get(member, ()) for member in members)
        new = replace(new, kept=kept, pool=pool)
        return Progress(self.epoch, self.steps_done, new, 0, (0,) * len(members), idle)

    def _stays(self, members: Sequence[int], shares: Mapping[int, int]) -> bool:
        """Return whether the same members were asked for their speeds, and have the same shares."""
        is_whole = not (self.idle or self.has_lost)
        is_same = tuple(members) == self.plan.members and shares == self.plan.shares_by_member
        return is_whole and is_same and is_due(self.settled)

    def share(self, rank: int) -> list[float]:
        """Return the factors for this rank's mean loss, one for each pass of the step at hand.

        With these factors, the sums over passes, averaged over the ranks that are not idle, give
        the mean over the step's samples: n * ranks / total for a batch of n. All are 0 if the step
        has no samples at all. That is so where all ranks have drawn repeats ahead, and the one that
        had the samples has been lost.
        """
        size, weights = len(self.plan.members), self.plan.weights(self.done)
        total, ranks = sum(weights), size - len(self.idle)
        return [weight * ranks / total if total else 0.0 for weight in weights[rank::size]]

    def correction(self, members: Collection[int]) -> float:
        """Return the factor for the average over ``members`` only, in the step at hand.

        It makes the average the mean over their samples; it is 1 where none of them has any.
        """
        among = [rank for rank, member in enumerate(self.plan.members) if member in members]
        size, weights = len(self.plan.members), self.plan.weights(self.done)
        theirs = sum(weights[slot] for slot in range(len(weights)) if slot % size in among)
        ranks = sum(member in members and member not in self.idle for member in self.plan.members)
        return ranks * sum(weights) / ((size - len(self.idle)) * theirs) if theirs else 1.0


def _without_weight(batches: tuple[Batch, ...], first: int) -> tuple[Batch, ...]:
    """Return the same samples, but leave those of the ``first`` batches to others."""
    unused = [Batch((), tuple(batch.positions), counts=False) for batch in batches[:first]]
    return (*unused, *batches[first:])

"""The samples of an elastic job: each counts once in an epoch, whoever dies, comes and leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from kolovod.core import rank_info
from kolovod.elastic.dealt_data import DealtData, hold
from kolovod.elastic.drawing import Batches, Drawn, Draws, Indices, Lists
from kolovod.elastic.positions import Span
from kolovod.elastic.sampling import Batch, Progress, Rules
from kolovod.elastic.sampling_exchange import Said, Terms, agree
from kolovod.elastic.speeds import SpeedMeter, is_due
from kolovod.errors import ElasticArgumentError

__all__ = ["ElasticSampler"]

T = TypeVar("T")

_SEEDS = 2**32


class ElasticSampler(DealtData):
    """The indices of a dataset that are this rank's, while ranks come and go.

    Give it to a loader as ``sampler``, or ``batches()`` as ``batch_sampler``. A step of the
    training takes one batch on each rank, in the order in which they are drawn; how many are drawn
    ahead does not matter. After each step ``record_step`` is called on all ranks, and ``changed``
    where the ranks are others than before: ``State.commit`` does both for a state that has the
    sampler.

    In an epoch each sample counts once (``pad=False``), however many ranks are lost, come and leave
    meanwhile. Where the samples of a step cannot be shared equally, or a rank has none, the batches
    differ by one sample or a rank gets one that counts elsewhere; so multiply the mean loss of
    each batch by ``weight``, and the average of the ranks' gradients is that of all the step's
    samples. With ``pad`` samples are repeated instead until all ranks have equally many.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        pad: bool = True,
        *,
        samples_per_step: int | None = None,
        by_speed: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        """``batch_size``: samples per rank and batch; a loader that cuts batches itself has it too.

        ``samples_per_step``: of all ranks together, the same however many there are; then
        ``batch_size`` is the most that a rank takes at a time, and a step has ``passes`` batches.
        It goes with ``pad=False`` and ``batches()``. ``by_speed``: share the samples of a step by
        the speeds at which ranks were measured, in place of equally; give ``batch_size`` room for
        what the fastest one takes. See ``is_due``. ``rank``, ``size``: those of the world by
        default, asked when they are needed first. Raises InvalidArgumentError for values that
        cannot work.
        """
        if not isinstance(seed, int):
            raise ElasticArgumentError(f"seed is {seed!r}: need a whole number")
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self._rules = Rules(len(dataset), batch_size, pad, samples_per_step, by_speed)
        self._rules.check()
        self._given = rank, size
        self._lock = threading.RLock()  # a loader may draw in a thread of its own
        self._progress = Progress.begin(self._rules, 0)
        self._order: np.ndarray[Any, Any] | None = None
        self._member: int | None = None  # in the job; None before it is known
        self._rank = 0
        self._draws: Draws | None = None  # whoever draws now
        self._drawn = 0  # batches of the plan
        self._resume = 0  # how many of the step at hand ``steps`` has already
        self._has_recorded = False  # in this epoch
        self._meter = SpeedMeter()

    @property
    def epoch(self) -> int:
        """The number of the epoch at hand."""
        return self._progress.epoch

    @property
    def batch_size(self) -> int:
        """Samples per rank and batch, at most."""
        return self._rules.batch_size

    @property
    def pad(self) -> bool:
        """True if samples are repeated until all ranks have equally many."""
        return self._rules.pad

    @property
    def passes(self) -> int:
        """Batches that each rank takes in a step."""
        return self._placed().plan.passes

    @property
    def steps_done(self) -> int:
        """Steps of this epoch that are recorded: the same on all ranks."""
        return self._progress.steps_done

    @property
    def steps_left(self) -> int:
        """Steps that this epoch still takes if nothing changes: the same on all ranks."""
        return self._placed().steps_left

    @property
    def samples(self) -> int:
        """The number of samples that count in the step at hand, of all ranks together."""
        progress = self._in_a_step()
        return sum(progress.plan.weights(progress.done))

    @property
    def weights(self) -> list[float]:
        """``weight`` for each of the step's ``passes``."""
        return self._in_a_step().share(self._rank)

    @property
    def weight(self) -> float:
        """The factor for the mean loss of this rank's batch, in the step at hand.

        It is this rank's share of the step's samples times the number of ranks: 1 where all have
        equally many, 0 where this rank's sample counts elsewhere. Raises InvalidArgumentError where
        a step has several passes, and after an epoch's last step.
        """
        weights = self.weights
        if len(weights) > 1:
            raise ElasticArgumentError(
                f"a step has {len(weights)} passes: each has a weight of its own, see weights"
            )
        return weights[0]

    @property
    def shares(self) -> list[float]:
        """The ranks' parts of a step's samples, by rank: equal ones, or by their speeds."""
        plan = self._placed().plan
        weights = plan.shares or (1,) * len(plan.members)
        return [weight / sum(weights) for weight in weights]

    @property
    def is_due(self) -> bool:
        """True if ``changed`` is to be called to share samples by speed: the same on all ranks.

        With ``by_speed`` that is after 10, 20, 40, 80, 160 steps with the same ranks and shares,
        and then every 160. ``State.commit`` sees to it for a state that has the sampler.
        """
        now = self._progress
        is_shared = self._rules.by_speed and len(now.plan.members) > 1
        return is_shared and is_due(now.settled)

    def correction(self, members: Collection[int]) -> float:
        """Return the factor for the average over ``members`` if others have been lost meanwhile.

        ``members``: numbers as in ``changed``. The factor makes the average of weighted gradients
        that of the samples of those whose gradients are in it; it is 1 where all have equally many.
        """
        return self._in_a_step().correction(members)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, in another order, the same on all ranks. No effect if it is at hand."""
        if not isinstance(epoch, int):
            raise ElasticArgumentError(f"epoch is {epoch!r}: need a whole number")
        with self._lock:
            if epoch != self._progress.epoch:
                self._begin(Progress.begin(self._rules, epoch))

    def record_step(self, members: Collection[int] | None = None) -> None:
        """Note that a step is done: on all ranks, after each.

        ``members``: those whose gradients are in the step's result, by their numbers in the last
        ``changed``; None: all that have not been lost. Raises InvalidArgumentError if not all of
        the step's batches have been drawn, after the last step, and for other ``members``.
        """
        with self._lock:
            progress = self._progress.record(members)
            if self._drawn < progress.done * progress.plan.passes:
                raise ElasticArgumentError(
                    f"a step is recorded, but of its {progress.plan.passes} batches "
                    f"{self._drawn - self._progress.done * progress.plan.passes} have been drawn"
                )
            if members is not None and self._member not in (None, *members):
                raise ElasticArgumentError(
                    f"members is {sorted(members)}: this is member {self._member}"
                )
            if self._rules.by_speed:
                plan = progress.plan
                own = plan.weights(self._progress.done)[self._rank :: len(plan.members)]
                self._meter.step(progress.settled, sum(own))
            self._progress, self._has_recorded = progress, True

    def changed(
        self, member: int, allgather: Callable[[Any], list[Any]], *, takes_part: bool = True
    ) -> None:
        """Share what is left of the epoch among other ranks: on all ranks, between two steps.

        ``member``: this process's number in the job, never another's, also of those that are gone.
        ``allgather(value)``: the values of all ranks, by rank, such that all ranks get the same or
        none does. It is called once, and once more if a rank has come: that one goes on where the
        others are. What it raises is raised, and then nothing has changed here. Raises
        MismatchError on all ranks if they have different data or are not at the same step.
        ``takes_part``, the same on all ranks: False gives ranks that have come no samples in the
        next step, but a repeated one without weight.
        """
        hold(self.exchange(member, takes_part=takes_part), allgather)

    def exchange(self, member: int, *, takes_part: bool = True) -> Generator[Any, list[Any], None]:
        """Yield what is to be gathered from all ranks where they are others than before."""
        with self._lock:
            is_placed = self._member == member
            values = (self._rules, self.shuffle, self.seed)
            terms = Terms("sampler", "(rules, shuffle, seed)", values)
            offer = None if is_placed else self._anew
            said = Said(self._drawn, self._meter.speed)
            progress = yield from agree(
                member, terms, self._progress, said, offer, takes_part=takes_part
            )
            self._install(progress, member, keep=is_placed)

    def keep(self) -> Callable[[], None]:
        """Return what makes the place in the data again what it is now, after a commit."""
        kept = self._progress, self._has_recorded

        def restore() -> None:
            with self._lock:
                if self._progress is not kept[0]:  # another epoch has begun
                    self._draws, self._drawn, self._order = None, 0, None
                    self._progress, self._has_recorded = kept

        return restore

    def _anew(self) -> Progress:
        now = self._progress
        return Progress.begin(self._rules, now.epoch, now.steps_done, now.left())

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is, as plain numbers: the same on all ranks after a step."""
        now = self._progress
        return {
            "epoch": now.epoch,
            "steps": now.steps_done,
            "left": [list(span) for span in now.left()],
            "length": self._rules.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned, with any number of ranks; on all ranks.

        A loop over a loader that is under way ends; begin another one. Raises InvalidArgumentError
        if the state is of other data, or none.
        """
        try:
            epoch, steps = int(state["epoch"]), int(state["steps"])
            left = tuple((int(start), int(stop)) for start, stop in state["left"])
            theirs = state["length"], state["seed"], state["shuffle"]
        except (KeyError, TypeError, ValueError) as error:
            raise ElasticArgumentError(
                f"not the state of a sampler ({error!r}): {state!r}"
            ) from None
        mine = self._rules.length, self.seed, self.shuffle
        if theirs != mine:
            raise ElasticArgumentError(
                "the state is of a sampler with (length, seed, shuffle) = "
                f"{theirs}, but this one has {mine}"
            )
        _check_spans(left, self._rules.length)
        with self._lock:
            self._begin(Progress.begin(self._rules, epoch, steps, left))

    def __len__(self) -> int:
        """Return the number of indices of this rank in this epoch, those that are done included."""
        now = self._placed()
        if not now.steps_left:
            return now.steps_done * now.plan.passes * self.batch_size
        last = now.plan.batch(self._rank, now.plan.batches - 1)
        before = (now.steps_done + now.steps_left) * now.plan.passes - 1
        return before * self.batch_size + len(last.positions)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of this rank from the first step that is not recorded.

        What iterated before ends. Raises InvalidArgumentError with ``samples_per_step``, where
        batches have various sizes.
        """
        if self._rules.samples_per_step is not None:
            raise ElasticArgumentError(
                f"samples_per_step is {self._rules.samples_per_step}: batches have various sizes, "
                "so give batches() to the loader, as batch_sampler"
            )
        return Indices(self._start, self._draw, self.batch_size)

    def batches(self) -> Batches:
        """Return the indices cut into batches, for a loader that takes a ``batch_sampler``."""
        return Batches(self, lambda: Lists(self._start, self._draw))

    def steps(self, loader: Iterable[T]) -> Iterator[Iterator[tuple[T, float]]]:
        """Yield the epoch's remaining steps: for each the loader's batches and their weights.

        ``loader``: one that draws from this sampler, and can be iterated again. It is, where it has
        come to its end before samples were given back to this rank. Steps without any sample are
        left out. Raises InvalidArgumentError if a step has not been recorded when the next one is
        asked for, or the loader makes other batches than this sampler.
        """
        source = _Source(self, loader)
        while self.steps_left:
            before = self._progress
            # Where the caller commits, samples come back after a loss, and who is idle gets the
            # state: so it must get there.
            is_wanted = self.samples > 0 or before.has_lost or bool(before.idle)
            step = self._passes(source)
            if is_wanted:
                yield step
            for _ in step:
                pass  # what the caller has left
            if not is_wanted:
                self.record_step()
            if self._progress is before:
                raise ElasticArgumentError(
                    f"step {before.steps_done} of epoch {before.epoch} has not been recorded: call "
                    "state.commit(), or record_step(), after each step"
                )

    def _passes(self, source: _Source[T]) -> Iterator[tuple[T, float]]:
        for number, weight in enumerate(self.weights):
            yield source.next(number), weight

    # --- places ---

    def _placed(self) -> Progress:
        """The progress among known ranks: those of the world, before ``changed`` says others."""
        with self._lock:
            if not self._progress.plan.members:
                rank, size = self._given
                rank = rank_info.rank() if rank is None else rank
                size = rank_info.size() if size is None else size
                if not 0 <= rank < size:
                    raise ElasticArgumentError(f"rank is {rank} of {size}: need 0 <= rank < size")
                self._rank = rank
                self._progress = self._progress.change(range(size), {})
            return self._progress

    def _in_a_step(self) -> Progress:
        progress = self._placed()
        if not progress.steps_left:
            raise ElasticArgumentError(
                f"all {progress.steps_done} steps of epoch {progress.epoch} are done: no step "
                "is at hand"
            )
        return progress

    def _begin(self, progress: Progress) -> None:
        """Under the lock."""
        if self._member is not None:
            progress = replace(progress, idle=self._progress.idle)
            now = self._progress.plan
            progress = progress.change(now.members, {}, before=now.shares_by_member)
        progress = replace(progress, settled=self._progress.settled)
        if progress.epoch != self._progress.epoch:
            self._order = None
        self._progress, self._draws, self._drawn = progress, None, 0
        self._has_recorded = False

    def _install(self, progress: Progress, member: int, *, keep: bool) -> None:
        """Under the lock. ``keep``: this rank was in the plan before, and keeps what it has."""
        before = self._progress
        if progress is before:
            return
        self._meter.forget()
        if keep:
            self._drawn = max(0, self._drawn - before.done * before.plan.passes)
        else:
            self._draws, self._drawn, self._has_recorded = None, 0, False
        if progress.epoch != before.epoch:
            self._order = None
        self._progress, self._member = progress, member
        self._rank = progress.plan.members.index(member)

    # --- drawing ---

    def _start(self, draws: Draws) -> None:
        """Let ``draws`` draw from now on, from what has not been consumed."""
        with self._lock:
            now = self._placed()
            if not now.steps_left and self._has_recorded:
                raise ElasticArgumentError(
                    f"all {now.steps_done} steps of epoch {now.epoch} are done: set_epoch begins "
                    "another one"
                )
            self._draws, self._drawn = draws, now.done * now.plan.passes + self._resume

    def _draw(self, draws: Draws) -> Drawn | None:
        """Return the next batch; None at the end."""
        with self._lock:
            plan = self._placed().plan
            if self._draws is not draws or self._drawn >= plan.batches:
                return None
            batch = plan.batch(self._rank, self._drawn)
            self._drawn += 1
            has_weight = batch.counts and (self.pad or bool(batch.own))
            return Drawn(self._indices(batch), has_weight, self._drawn < plan.batches)

    def _indices(self, batch: Batch) -> list[int]:
        if not self.shuffle:
            return batch.positions
        if self._order is None:
            # A stream that NumPy keeps for ever, so a checkpoint means the same order everywhere;
            # and the others wait for a rank that has come: random.shuffle takes a second here for
            # a million samples.
            seeds = [self.seed % _SEEDS, self.epoch % _SEEDS]
            self._order = np.random.RandomState(seeds).permutation(self._rules.length)
        indices: list[int] = self._order[batch.positions].tolist()
        return indices


class _Source(Generic[T]):
    """A loader's batches, from as many iterations as it takes."""

    def __init__(self, sampler: ElasticSampler, loader: Iterable[T]) -> None:
        self._sampler, self._loader = sampler, loader
        self._batches: Iterator[T] | None = None
        self._draws: Draws | None = None

    def next(self, consumed: int) -> T:
        """Return the next one; ``consumed``: how many of the step at hand have come before."""
        sampler = self._sampler
        if self._batches is not None and sampler._draws is self._draws:
            try:
                return next(self._batches)
            except StopIteration:
                self._check_all_came(consumed)
        sampler._resume = consumed
        try:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        except StopIteration:
            raise ElasticArgumentError(
                f"the loader has no batch, but {sampler.steps_left} steps of epoch {sampler.epoch} "
                "are left: does it draw from this sampler?"
            ) from None
        finally:
            sampler._resume = 0
        self._draws = sampler._draws
        return batch

    def _check_all_came(self, consumed: int) -> None:
        now = self._sampler._progress
        came = now.done * now.plan.passes + consumed
        if came != self._sampler._drawn:
            raise ElasticArgumentError(
                f"the loader has come to its end after {came} batches of {self._sampler._drawn} "
                f"that it has drawn: does it cut batches of {self._sampler.batch_size}, and keep "
                "the last one?"
            )


def _check_spans(spans: Sequence[Span], length: int) -> None:
    at = -1
    for start, stop in spans:
        if not at < start < stop <= length:
            raise ElasticArgumentError(
                f"left is {list(map(list, spans))}: need ascending ranges within 0 to {length}"
            )
        at = stop

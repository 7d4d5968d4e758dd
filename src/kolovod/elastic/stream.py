"""A stream of samples in an elastic job: each counts once in an epoch, however long it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from kolovod.core.objects import Objects
from kolovod.core.transaction import transaction
from kolovod.core.world import current
from kolovod.elastic.dealt_data import DealtData, hold
from kolovod.elastic.reading import Make, Reader, samples_of
from kolovod.elastic.sampling_exchange import Said, Terms, agree
from kolovod.elastic.streaming import Part, Report, Snapshot, StreamProgress, StreamStep
from kolovod.errors import ElasticArgumentError

__all__ = ["ElasticStream"]

T = TypeVar("T")

_MOST_PARTS = 1 << 16


class ElasticStream(DealtData, Generic[T]):
    """Batches of loaders whose lengths nobody knows, while ranks come and go.

    The data of an epoch are cut into ``parts``, always as many, however many ranks there are. A
    rank reads one part at a time, by a loader that the script makes, and takes a batch of it in
    each step; at its end it takes another part that nobody has. What a step takes all ranks agree
    on before it, so all know how far each part is. When a rank is lost, another one goes on with
    its part: from the last state of the loader that all know, if it can tell its state, and by
    reading again what came before.

    After each step ``record_step`` is called on all ranks, and ``changed`` where the ranks are
    others than before: ``State.commit`` does both for a state that has the stream. A rank for which
    no part is left gets a batch without weight until the others are through. Multiply the mean loss
    of each batch by its weight, and the average of the ranks' gradients is that of all the step's
    samples.
    """

    def __init__(
        self,
        make: Make[T],
        parts: int,
        *,
        samples: Callable[[T], int] = samples_of,
        snapshot_every: int = 16,
        snapshot_bytes: int = 1 << 20,
    ) -> None:
        """``make(part, parts, epoch)``: returns the batches of a part, from 0 to ``parts - 1``.

        It may be a StatefulDataLoader of torchdata, or whatever can be iterated over; the same
        batches on all ranks and whenever it is called with the same arguments. ``parts``: some
        times the largest number of ranks. ``samples(batch)``: how many samples a batch has; by
        default the first dimension of the first array or tensor in it, else the length of a list.
        ``snapshot_every``: batches of a part after which the state of its loader is given to all
        ranks, unless that has more than ``snapshot_bytes`` bytes. Raises InvalidArgumentError for
        values that cannot work.
        """
        for name, value in (("make", make), ("samples", samples)):
            if not callable(value):
                raise ElasticArgumentError(f"{name} is {value!r}: need a function")
        for name, number, most in (
            ("parts", parts, _MOST_PARTS),
            ("snapshot_every", snapshot_every, None),
            ("snapshot_bytes", snapshot_bytes, None),
        ):
            if not isinstance(number, int) or number < 1 or (most and number > most):
                at_most = f", at most {most}" if most else ""
                raise ElasticArgumentError(
                    f"{name} is {number!r}: need a whole number above 0{at_most}"
                )
        self._make, self._samples = make, samples
        self._every, self._most_bytes = snapshot_every, snapshot_bytes
        self._progress = StreamProgress(0, 0, (Part(),) * parts)
        self._agreed = self._progress  # in the step at hand
        self._step: StreamStep | None = None
        self._member: int | None = None  # in the job; None before ``changed`` says it
        self._reader: Reader[T] | None = None
        self._last: list[T] = []  # the last batch that this rank has read

    @property
    def parts(self) -> int:
        """The number of parts of an epoch."""
        return len(self._progress.parts)

    @property
    def epoch(self) -> int:
        """The number of the epoch at hand."""
        return self._progress.epoch

    @property
    def steps_done(self) -> int:
        """Steps of this epoch that are recorded: the same on all ranks."""
        return self._progress.steps_done

    @property
    def samples_done(self) -> int:
        """Samples that have counted in this epoch: the same on all ranks."""
        return sum(part.samples for part in self._progress.parts)

    @property
    def samples(self) -> int:
        """The number of samples that count in the step at hand, of all ranks together."""
        return self._in_a_step().samples

    def correction(self, members: Collection[int]) -> float:
        """Return the factor for the average over ``members`` if others have been lost meanwhile.

        ``members``: numbers as in ``changed``. The factor makes the average of weighted gradients
        that of the samples of those whose gradients are in it.
        """
        return self._in_a_step().correction(members)

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, the same on all ranks. No effect if it is at hand."""
        if not isinstance(epoch, int):
            raise ElasticArgumentError(f"epoch is {epoch!r}: need a whole number")
        if epoch != self._progress.epoch:
            self._go_to(self._progress.begin(epoch))

    def steps(self) -> Iterator[tuple[T, float]]:
        """Yield, for each of the epoch's remaining steps, this rank's batch and its weight.

        All ranks take the next one alike, and run no other operations meanwhile. A step that was
        not recorded gets the same batch again. Raises InvalidArgumentError if a step has not been
        recorded when the next one is asked for; MismatchError, on all ranks, if they are not at the
        same place.
        """
        while (step := self._agree()) is not None:
            before = self._progress
            yield self.batch_of(step, self._own_number())
            if self._progress is before:
                raise ElasticArgumentError(
                    f"step {before.steps_done} of epoch {before.epoch} has not been recorded: call "
                    "state.commit() after each step, with the stream in the state, or record_step()"
                )

    def record_step(self, members: Collection[int] | None = None) -> None:
        """Note that a step is done: on all ranks, after each.

        ``members``: those whose gradients are in the step's result, by their numbers in the last
        ``changed``; None: all of the step. Raises InvalidArgumentError if no step is at hand, and
        for other ``members``.
        """
        step = self._in_a_step()
        if members is not None and self._member not in (None, *members):
            raise ElasticArgumentError(
                f"members is {sorted(members)}: this is member {self._member}"
            )
        self._progress, self._step = self._agreed.record(step, members), None

    def changed(
        self, member: int, allgather: Callable[[Any], list[Any]], *, takes_part: bool = True
    ) -> None:
        """Share what is left among other ranks: on all ranks, between two steps.

        Arguments and errors are those of ``ElasticSampler.changed``.
        """
        hold(self.exchange(member, takes_part=takes_part), allgather)

    def exchange(self, member: int, *, takes_part: bool = True) -> Generator[Any, list[Any], None]:
        """Yield what is to be gathered from all ranks where they are others than before."""
        terms = Terms("stream", "(parts,)", (self.parts,))
        offer = None if self._member == member else self._anew
        self._progress = yield from agree(
            member, terms, self._progress, Said(), offer, takes_part=takes_part
        )
        self._member, self._step = member, None

    def _anew(self) -> StreamProgress:
        return replace(self._progress, members=(), held=(), idle=())

    def rounds(self, member: int) -> Generator[Report, list[Report], StreamStep | None]:
        """Agree with all ranks on the next step, which is returned; None: the epoch is over.

        Yields what is to be gathered, from all ranks that are left; each list that is sent must be
        the same on all of them.
        """
        self._step, now = None, self._progress
        while not now.is_over:
            reports = yield self._report(member, now)
            now, step = now.heard(reports)
            if step is not None and step.taken:
                self._agreed, self._step = now, step
                return step
        self._progress, self._reader = now, None
        return None

    def keep(self) -> Callable[[], None]:
        """Return what makes the place in the data again what it is now, after a commit."""
        kept = self._progress

        def restore() -> None:
            self._progress, self._step = kept, None

        return restore

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is: the same on all ranks after a step.

        They are plain numbers but for the states of loaders, which are as these tell them.
        """
        now = self._progress
        return {
            "epoch": now.epoch,
            "steps": now.steps_done,
            "parts": [[part.batches, part.samples, part.has_ended] for part in now.parts],
            "snapshots": [
                [number, part.snapshot.batches, copy.deepcopy(part.snapshot.state)]
                for number, part in enumerate(now.parts)
                if part.snapshot is not None
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` has returned, with any number of ranks; on all ranks.

        Raises InvalidArgumentError if the state is of another number of parts, or none.
        """
        try:
            epoch, steps = int(state["epoch"]), int(state["steps"])
            parts = [Part(int(b), int(s), bool(e)) for b, s, e in state["parts"]]
            for number, batches, of_loader in state["snapshots"]:
                if not 0 <= batches <= parts[number].batches:
                    raise ValueError(f"a snapshot of part {number} after {batches} batches")
                parts[number] = replace(parts[number], snapshot=Snapshot(batches, of_loader))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ElasticArgumentError(
                f"not the state of a stream ({error!r}): {state!r}"
            ) from None
        if len(parts) != self.parts:
            raise ElasticArgumentError(
                f"the state is of a stream of {len(parts)} parts, but this one has {self.parts}"
            )
        if any(min(part.batches, part.samples) < 0 for part in parts):
            raise ElasticArgumentError(f"parts is {state['parts']}: need numbers of 0 or more")
        at = replace(self._progress, epoch=epoch, steps_done=steps, parts=tuple(parts), held=())
        self._go_to(at.dealt())

    # --- the step at hand ---

    def _go_to(self, progress: StreamProgress) -> None:
        self._progress, self._step, self._reader = progress, None, None

    def _in_a_step(self) -> StreamStep:
        if self._step is None:
            raise ElasticArgumentError(
                f"no step of the stream is at hand, after {self.steps_done} in epoch {self.epoch}: "
                "take a batch of steps() before"
            )
        return self._step

    def _agree(self) -> StreamStep | None:
        members = current().members
        if self._member is None and self._progress.members != members:  # nobody comes or goes
            self._progress = self._progress.change(members, {})
        objects = Objects(current)
        return hold(
            self.rounds(self._own_number()),
            lambda report: transaction().run(
                lambda: objects.allgather_object(report, "elastic.stream")
            ),
        )

    def _own_number(self) -> int:
        world = current()
        return world.members[world.rank] if self._member is None else self._member

    def _report(self, member: int, now: StreamProgress) -> Report:
        number = now.part_of(member)
        if number is None:
            return Report(member, now.at, None)
        part, snapshot = now.parts[number], None
        reader = self._reader
        is_of_part = reader is not None and (reader.part, reader.epoch) == (number, now.epoch)
        if reader is None or not is_of_part or not reader.is_at(part.batches):
            self._reader = None  # whose workers, if it has such, may end before others begin
            reader = self._open(number, part)
            self._reader = reader
        before = part.snapshot
        is_due = before is None or part.batches - before.batches >= self._every
        if is_due and reader.read == part.batches:
            snapshot = reader.snapshot(self._most_bytes)
        reading = reader.batch(part.batches)
        if reading is None:
            return Report(member, now.at, number, None, snapshot)
        self._last = [reading.batch]
        return Report(member, now.at, number, reading.samples, snapshot)

    def _open(self, number: int, progress: Part) -> Reader[T]:
        reader = Reader(self._make, self._samples, number, self.parts, self.epoch)
        reader.go_to(progress)
        return reader

    def batch_of(self, step: StreamStep, member: int) -> tuple[T, float]:
        """Return this rank's batch in a step, and its weight; ``member``: its number."""
        if not self._last:  # nor is there a part for this rank
            number = min(number for number, _ in step.taken.values())
            reading = self._open(number, Part()).batch(0)
            if reading is None:
                raise ElasticArgumentError(
                    f"part {number} has no batch on this rank, but on another one: make must "
                    "return the same batches whenever it is called with the same arguments"
                )
            self._last = [reading.batch]
        return self._last[0], step.weight(member)

"""Process sets in the state of an elastic job: their members are processes, not ranks.

A set belongs to a world, and ends with it. One that is in a State is formed again in each next
world, of those of its members that are left: a process that comes later is another one, also where
it takes a rank that a member had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from kolovod.core import process_sets
from kolovod.core.objects import Objects
from kolovod.core.process_sets import Membership, form_process_set
from kolovod.core.world import World, current
from kolovod.errors import (
    BootstrapError,
    CollectiveAbortedError,
    ElasticArgumentError,
    NotInitializedError,
)

__all__ = ["KeptSets", "Patience", "ProcessSet"]

_MOST_FAILURES = 3
"""Worlds in a row in which a set cannot be formed, before that is an error."""


class ProcessSet(process_sets.ProcessSet):
    """A process set for a State, which follows its members when the ranks change.

    ``ranks``, ``size()`` and ``rank()`` are those of the present world. It is usable from the
    beginning of the function that ``elastic.run`` calls, also on ranks that join later.
    """

    def __init__(self, ranks: Iterable[int], on_loss: Literal["shrink", "drop"] = "shrink") -> None:
        """``ranks``: in the world that the job begins with; on ranks that join what rank 0 has.

        ``on_loss``: when a member is lost, or leaves, the others go on ("shrink"), or the set is
        not usable any more ("drop"). Raises InvalidArgumentError for what cannot be.
        """
        super().__init__(ranks)
        if on_loss not in ("shrink", "drop"):
            raise ElasticArgumentError(f'on_loss is {on_loss!r}: need "shrink" or "drop"')
        self.on_loss = on_loss
        self.numbers = tuple(self._ranks)
        """Of the members, the lost ones included (``World.members``); a job begins with 0, 1..."""
        self._was_formed = False
        self._why_dropped = ""

    @property
    def is_dropped(self) -> bool:
        """True if it is not usable any more, since members were lost."""
        return bool(self._why_dropped)

    @property
    def comes_later(self) -> bool:
        """True if the function that ``elastic.run`` calls has not begun yet."""
        return not self._was_formed and self.process_set_id is None

    def follow(self, numbers: Sequence[int], world: World) -> bool:
        """Have the members with these numbers that are in ``world``; False: it is dropped."""
        self.numbers = tuple(numbers)
        self._forget()
        self._was_formed = True
        self._ranks = [rank for rank, number in enumerate(world.members) if number in self.numbers]
        lost = sorted(set(self.numbers) - set(world.members))
        if not self._ranks:
            self._why_dropped = f"all its members, {lost}, were lost"
        elif lost and self.on_loss == "drop":
            self._why_dropped = f'its members {lost} were lost, and on_loss is "drop"'
            self._ranks = []
        return not self._why_dropped

    def included(self) -> bool:
        """Return whether this rank is a member.

        Raises InvalidArgumentError if the set is dropped.
        """
        self._check()
        return super().included()

    def position(self, rank: int) -> int:
        """Return the position of ``rank`` in it, as in every set.

        Raises InvalidArgumentError if the set is dropped.
        """
        self._check()
        return super().position(rank)

    def membership(self) -> Membership:
        """Return the membership, as every set does.

        Raises InvalidArgumentError if the set is dropped, NotInitializedError before
        ``elastic.run`` has formed it.
        """
        self._check()
        if self.comes_later:
            raise NotInitializedError(f"{self} is usable within the function of elastic.run")
        return super().membership()

    def __repr__(self) -> str:
        """Name its present ranks, or the members that it had."""
        if self._why_dropped:
            return f"process set of the members {list(self.numbers)}"
        return super().__repr__()

    def _check(self) -> None:
        if self._why_dropped:
            raise ElasticArgumentError(
                f"{self} cannot be used any more: {self._why_dropped}. Ask is_dropped before"
            )


class Patience:
    """Repeated tries with sets that could not be formed: another world may help against that."""

    def __init__(self) -> None:
        self._failures = 0

    def attempt(self, form: Callable[[], None]) -> None:
        """Call ``form()``, and turn its BootstrapError into a CollectiveAbortedError.

        After a few failures in a row the BootstrapError is raised as it is.
        """
        try:
            form()
        except BootstrapError as error:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                raise
            raise CollectiveAbortedError(str(error)) from error
        self._failures = 0


class KeptSets:
    """The process sets of a state."""

    def __init__(self, sets: Sequence[ProcessSet], first_size: int | None) -> None:
        """``sets``: in an order that is the same on all ranks.

        ``first_size``: of the world that the job begins with; None on a process that joins. Raises
        InvalidArgumentError for a rank that is not in it, on every rank before any of them ends by
        it: the others would take it for a lost one.
        """
        for kept in sets:
            last = kept.numbers[-1]
            if first_size is not None and last >= first_size:
                raise ElasticArgumentError(
                    f"process set {list(kept.numbers)}: rank {last} is not in "
                    f"0..{first_size - 1}, the ranks that the job begins with"
                )
        self._sets = sets
        self._patience = Patience()

    def form(self) -> None:
        """All ranks are in another world, and call this before anything else there.

        Raises CollectiveAbortedError if a rank is lost meanwhile, or a set could not be formed,
        which another world may help against; BootstrapError if it did not; InvalidArgumentError
        where rank 0 has another number of sets.
        """
        world = current()
        # Also without sets: where others have some, they would wait for this rank.
        own = [kept.numbers for kept in self._sets]
        said = Objects(current).broadcast_object(own, 0, "elastic.process_sets")
        if len(said) != len(own):
            raise ElasticArgumentError(
                f"this rank has {len(own)} process sets in its state, rank 0 has {len(said)}: give "
                "the states of all ranks the same"
            )
        self._patience.attempt(lambda: self._form(said, world))

    def _form(self, said: Sequence[tuple[int, ...]], world: World) -> None:
        for kept, numbers in zip(self._sets, said, strict=True):
            if kept.follow(numbers, world):
                form_process_set(kept)
            else:
                world.sets.next_id += 1  # so that those after it keep their number

"""Jobs of replicas: several ranks hold one model together, each a part of it.

The slots of a replica follow each other (``membership.Policy.replica_size``), so the ranks that
have the same part are those whose slots have the same place in their replicas. They are a process
set, made anew in each world.
"""

from __future__ import annotations

from kolovod.core import process_sets
from kolovod.core.process_sets import Membership, form_process_set
from kolovod.elastic import job_membership
from kolovod.elastic.each_world import in_each_world
from kolovod.elastic.process_sets import Patience
from kolovod.errors import ElasticArgumentError, NotInitializedError

__all__ = ["PartSet", "is_of_replicas", "own_part"]


class PartSet(process_sets.ProcessSet):
    """The ranks that have the same part of the model as this one, in each world."""

    def __init__(self) -> None:
        """It has no ranks before the job's first world."""
        self._forget()
        self._ranks = []

    @property
    def comes_later(self) -> bool:
        """True if the function that ``elastic.run`` calls has not begun yet."""
        return self.process_set_id is None

    def included(self) -> bool:
        """Return True: it is this rank's own."""
        return True

    def membership(self) -> Membership:
        """Return the membership, as every set does.

        Raises NotInitializedError before ``elastic.run`` has formed it.
        """
        if self.comes_later:
            raise NotInitializedError(
                "the replicas of a job know each other within the function of elastic.run"
            )
        return super().membership()

    def follow(self, ranks: list[int]) -> None:
        """Have these, in the present world."""
        self._forget()
        self._ranks = ranks


class _Parts:
    """The sets of all parts; this rank is in one of them."""

    def __init__(self, index: int, size: int) -> None:
        """``index``: of this rank's part, among ``size``."""
        self.own = PartSet()
        self._index, self._size = index, size
        self._patience = Patience()

    def form(self) -> None:
        """All ranks are in another world, and call this. Raises as ``KeptSets.form``."""
        self._patience.attempt(self._form)

    def _form(self) -> None:
        membership = job_membership.current()
        assert membership is not None
        assert membership.client is not None
        slots = membership.client.slots
        for part in range(self._size):
            ranks = [rank for rank, slot in enumerate(slots) if slot % self._size == part]
            if part == self._index:
                self.own.follow(ranks)
                form_process_set(self.own)
            else:
                form_process_set(process_sets.ProcessSet(ranks))


_parts: _Parts | None = None


def is_of_replicas() -> bool:
    """Return whether this process is in a job of replicas."""
    membership = job_membership.current()
    return membership is not None and bool(membership.environment.replica)


def own_part() -> PartSet:
    """Return the ranks that have the same part as this one; on all ranks, before ``elastic.run``.

    Raises InvalidArgumentError in other jobs.
    """
    global _parts
    membership = job_membership.current()
    environment = None if membership is None else membership.environment
    if environment is None or not environment.replica or environment.process is None:
        raise ElasticArgumentError(
            "this job is not one of replicas: start it by kolovod run --elastic --replica-size N"
        )
    if _parts is None:
        replica = environment.replica
        _parts = _Parts(replica.index(environment.process), len(replica))
        in_each_world(_parts.form)
    return _parts.own

"""Horovod's process sets: those of Kolovod, which answer None while they are not registered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import kolovod
from kolovod.core.process_sets import Membership
from kolovod.core.process_sets import add_process_set as _add
from kolovod.core.process_sets import remove_process_set as _remove
from kolovod.core.submission import no_process_set
from kolovod.core.world import World
from kolovod.rendezvous.external.mpi import ranks_of

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "group_of", "remove_process_set"]


class ProcessSet(kolovod.ProcessSet):
    """Some ranks of the world, given as an iterable or as an mpi4py communicator."""

    def __init__(self, ranks_or_comm: Any) -> None:
        """Raises ValueError for anything else."""
        self.mpi_comm = None if isinstance(ranks_or_comm, Iterable) else ranks_or_comm
        super().__init__(ranks_or_comm if self.mpi_comm is None else ranks_of(ranks_or_comm))

    def renumber(self, members: Sequence[int]) -> None:
        """Set the ranks of a communicator's set, for a world of the launcher ranks ``members``.

        Raises ValueError for a set with other members.
        """
        launched = ranks_of(self.mpi_comm)
        if not set(launched) <= set(members):
            raise ValueError(f"{self} has other members than the world, {list(members)}")
        self._ranks = [members.index(rank) for rank in launched]

    def size(self) -> int | None:  # type: ignore[override]
        """Return the number of members; None while the set is not registered."""
        return None if self.process_set_id is None else super().size()

    def rank(self) -> int | None:  # type: ignore[override]
        """The place of this rank; None while it is not registered, ValueError for others."""
        return None if self.process_set_id is None else super().rank()

    def included(self) -> bool | None:  # type: ignore[override]
        """Return whether this rank is a member; None while the set is not registered."""
        return None if self.process_set_id is None else super().included()

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )


class _Global(ProcessSet):
    """All ranks, id 0; ``ranks`` is known once there is a world."""

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def process_set_id(self) -> int:
        """Always 0."""
        return 0

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        """All ranks, or None before ``init``."""
        return kolovod.global_process_set.ranks if kolovod.is_initialized() else None

    def size(self) -> int | None:  # type: ignore[override]
        """The world's size."""
        return kolovod.size() if kolovod.is_initialized() else None

    def rank(self) -> int | None:  # type: ignore[override]
        """The number of this rank."""
        return kolovod.rank() if kolovod.is_initialized() else None

    def included(self) -> bool | None:  # type: ignore[override]
        """True, once there is a world."""
        return True if kolovod.is_initialized() else None

    def position(self, rank: int) -> int:
        """``rank`` itself."""
        return rank

    def membership(self) -> Membership | World:  # type: ignore[override]
        """The world's."""
        return kolovod.global_process_set.membership()

    def __repr__(self) -> str:
        return repr(kolovod.global_process_set)


global_process_set = _Global()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set; called by all ranks. HOROVOD_DYNAMIC_PROCESS_SETS need not be set."""
    if not isinstance(process_set, kolovod.ProcessSet):
        process_set = ProcessSet(process_set)
    _add(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a set up; called by all ranks. False for the global one, and for one not registered."""
    return process_set is not global_process_set and _remove(process_set)


def group_of(process_set: Any) -> Any:
    """Return the set as Kolovod's verbs take it. Raises ValueError for what is no process set."""
    if process_set is None:
        return None
    try:
        return None if process_set.process_set_id == 0 else process_set
    except AttributeError:
        raise no_process_set(process_set) from None

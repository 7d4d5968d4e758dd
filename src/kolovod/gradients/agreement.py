"""Ranks that must have built the same say so to each other, before anything depends on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kolovod import _native
from kolovod.core.objects import Objects
from kolovod.core.submission import Group, WorldLike
from kolovod.errors import MismatchError

SAME_MODEL = "every rank must build the same model"

# Proposals for numbers of optimizers: each larger than any that this process has agreed to before.
_numbers = itertools.count()


def agree(
    objects: Objects,
    mine: list[tuple[str, Any]],
    what: str,
    name: str,
    process_set: Group | None = None,
    advice: str = SAME_MODEL,
) -> None:
    """Raise MismatchError on every rank unless all have the same ``mine``, in the same order."""
    said = objects.allgather_object(mine, name, process_set)
    _compare(said, what, advice, None if process_set is None else process_set.ranks)


class Agreement:
    """One optimizer's agreement with the ranks of its world: once in each, and its number there."""

    def __init__(self, world: Callable[[], WorldLike], process_set: Group | None = None) -> None:
        """``world``: is asked for the ranks; of them those of ``process_set`` agree, or all."""
        self.engine: _native.Engine | None = None
        """The engine of the world whose ranks have agreed."""
        self.number = 0
        """The number of this optimizer in that world, the same on all ranks."""
        self._world = world
        self._process_set = process_set

    def is_current(self) -> bool:
        """Return whether the ranks of the current world have agreed."""
        return self._engine_of_now() is self.engine

    def reach(self, mine: list[tuple[str, Any]], sparse_dims: Sequence[int] = ()) -> list[int]:
        """Agree that all ranks have ``mine``, and take a number; see ``extend``."""
        self.number, dims = self._agree(mine, SAME_MODEL, list(sparse_dims))
        self.engine = self._engine_of_now()
        return dims

    def extend(
        self, mine: list[tuple[str, Any]], advice: str, sparse_dims: Sequence[int] = ()
    ) -> list[int]:
        """Raise MismatchError, on every rank, unless all ranks say the same ``mine``.

        Returns the largest of all ranks' ``sparse_dims``, one by one.
        """
        return self._agree(mine, advice, list(sparse_dims))[1]

    def _agree(
        self, mine: list[tuple[str, Any]], advice: str, sparse_dims: list[int]
    ) -> tuple[int, list[int]]:
        """Agree, and find a number that all may take, and no dropped optimizer has had."""
        process_set = self._process_set
        proposal = next(_numbers)
        said = Objects(self._world).allgather_object(
            (proposal, mine, sparse_dims), "optimizer.parameters", process_set
        )
        number: int = max(proposal for proposal, _, _ in said)
        while proposal < number:
            proposal = next(_numbers)
        ranks = None if process_set is None else process_set.ranks
        _compare([theirs for _, theirs, _ in said], "optimizer parameter", advice, ranks)
        return number, [max(dims) for dims in zip(*(theirs for _, _, theirs in said), strict=True)]

    def _engine_of_now(self) -> _native.Engine:
        process_set = self._process_set
        return (self._world() if process_set is None else process_set.membership()).engine


def _compare(
    lists: list[list[tuple[str, Any]]], what: str, advice: str, ranks: list[int] | None = None
) -> None:
    """``ranks``: of the world, whose lists these are; None: all."""
    for number, theirs in enumerate(lists):
        if theirs == lists[0]:
            continue
        root, rank = (0, number) if ranks is None else (ranks[0], ranks[number])
        for position in range(max(len(theirs), len(lists[0]))):
            first, other = (_item(values, position) for values in (lists[0], theirs))
            if first != other:
                raise MismatchError(
                    f"{what} {position} differs: rank {root} has {first}, rank {rank} has {other}; "
                    f"{advice}"
                )


def _item(values: list[tuple[str, Any]], position: int) -> str:
    if position >= len(values):
        return "none"
    name, detail = values[position]
    return f"'{name}' {detail}"

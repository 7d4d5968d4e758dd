"""Process sets: some ranks of the world that communicate among themselves.

A set's members have an engine of their own, with its own names, order, memory and thread. So sets
that overlap can be in use at the same time and in any order, and none waits for another
(docs/design/engine.md). They share the world's fate: when a rank is lost, every set ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from kolovod import _native
from kolovod.core.objects import Objects
from kolovod.core.submission import Group, no_process_set
from kolovod.core.world import World, current, current_tracked, is_initialized
from kolovod.errors import BootstrapError, InvalidArgumentError, KolovodError, MismatchError

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "remove_process_set",
]

_NAME = "kolovod.process_sets"  # of the operations by which the ranks agree
_objects = Objects(current)


@dataclass(frozen=True, slots=True)
class Membership:
    """The facts that verbs need of a set, as a member sees it."""

    engine: _native.Engine
    rank: int
    size: int


class ProcessSet:
    """Ranks of the world that can be given to a verb as its ``process_set``.

    Usable between ``add_process_set`` (or ``init(process_sets=...)``) and ``remove_process_set`` or
    ``shutdown``, by its members. The object may be added again later.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """``ranks``: world ranks, in any order. Raises InvalidArgumentError for what cannot be."""
        try:
            self._ranks = sorted(index(rank) for rank in ranks)
        except TypeError:
            raise InvalidArgumentError(
                f"process set {ranks!r}: expected ranks (whole numbers)"
            ) from None
        if not self._ranks or len(set(self._ranks)) != len(self._ranks) or self._ranks[0] < 0:
            raise InvalidArgumentError(
                f"process set {self._ranks}: give at least one rank, each once, none negative"
            )
        self._world: World | None = None
        self._id: int | None = None
        self._membership: Membership | None = None

    @property
    def ranks(self) -> list[int]:
        """World ranks of the members, ascending."""
        return list(self._ranks)

    @property
    def process_set_id(self) -> int | None:
        """Its number, the same on all ranks: 0 for the world, None while it is not added."""
        return self._id if self._is_current() else None

    @property
    def comes_later(self) -> bool:
        """True if the set is not usable yet, but will be before a training begins."""
        return False

    def included(self) -> bool:
        """Return whether this rank is a member. Raises NotInitializedError."""
        return current_tracked().rank in self._ranks

    def size(self) -> int:
        """Return the number of members."""
        return len(self._ranks)

    def rank(self) -> int:
        """Position of this rank among the members. Raises InvalidArgumentError if it is none."""
        return self.position(current_tracked().rank)

    def position(self, rank: int) -> int:
        """Return the position of world rank ``rank``; InvalidArgumentError if it is no member."""
        try:
            return self._ranks.index(rank)
        except ValueError:
            raise InvalidArgumentError(f"rank {rank} is not in {self}") from None

    def membership(self) -> Membership:
        """Return engine, rank and size of the set, for a verb.

        Raises InvalidArgumentError if the set is not added, or this rank is not in it.
        """
        membership = self._membership
        if membership is None or not self._is_current():
            if current() is not self._world:
                raise InvalidArgumentError(
                    f"{self} is not part of this world: all ranks call add_process_set() first"
                )
            raise InvalidArgumentError(
                f"rank {current().rank} is not in {self}: only its members may submit to it"
            )
        return membership

    @property
    def engine(self) -> _native.Engine | None:
        """The engine that carries out its operations; None on ranks that are no members."""
        membership = self._membership  # once: other threads ask, too
        return membership.engine if membership is not None else None

    def _forget(self) -> None:
        """Be no part of a world any more, and keep nothing of it alive."""
        self._world = self._id = self._membership = None

    def __repr__(self) -> str:
        """Its members and its number."""
        number = "" if self.process_set_id is None else f" (id {self.process_set_id})"
        return f"process set {self._ranks}{number}"

    def _is_current(self) -> bool:
        return self._world is not None and is_initialized() and self._world is current()


class _GlobalProcessSet(ProcessSet):
    """All ranks of the world that this process is in."""

    def __init__(self) -> None:
        self._ranks = []

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(current_tracked().size))

    @property
    def process_set_id(self) -> int:
        """Always 0."""
        return 0

    def included(self) -> bool:
        """True. Raises NotInitializedError."""
        return current() is not None

    def size(self) -> int:
        """The world's size."""
        return current_tracked().size

    def position(self, rank: int) -> int:
        """``rank`` itself; the engine says when there is no such rank."""
        return rank

    def membership(self) -> World:  # type: ignore[override]
        """The world's engine, rank and size."""
        return current()

    def __repr__(self) -> str:
        return "the global process set"


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks; the same as giving no ``process_set``."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable. All ranks of the world call this, in the same order, members or not.

    Returns the ProcessSet (made of ``process_set`` if that is a list of ranks) once it is usable on
    all members. Raises, on every rank, MismatchError if the ranks do not name the same set,
    InvalidArgumentError if it names a rank that is not there, or equals another set or the world,
    BootstrapError if the members cannot form it; and what allgather raises.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _agree(("add_process_set", added.ranks))
    _check_new(added, current())
    form_process_set(added)
    return added


def form_process_set(added: ProcessSet) -> None:
    """``add_process_set`` of a set that all ranks are known to have; it may equal another one."""
    world = current()
    number = world.sets.next_id
    world.sets.next_id += 1
    engine: _native.Engine | None = None
    error: KolovodError | None = None
    if world.rank in added._ranks:
        try:
            engine = world.form(added._ranks)
        except KolovodError as failure:
            error = failure
    failures = [text for text in _exchange(error and str(error)) if text]
    if failures:
        if engine is not None:
            world.dissolve(engine)
        raise BootstrapError(f"process set {added.ranks} was not formed: {failures[0]}") from error
    if engine is not None:
        added._membership = Membership(engine, added.position(world.rank), len(added._ranks))
        _native.publish(number, engine)
    added._world, added._id = world, number
    world.sets.by_id[number] = added


def add_first_sets(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Add the sets that are given to ``init``, once it is sure that all ranks give the same.

    Raises what ``add_process_set`` raises.
    """
    added = [ps if isinstance(ps, ProcessSet) else ProcessSet(ps) for ps in process_sets]
    _agree(("init", [ps.ranks for ps in added]))
    for number, ps in enumerate(added):
        for before, other in enumerate(added[:number]):
            if ps.ranks == other.ranks:
                raise InvalidArgumentError(
                    f"process_sets[{number}] has the same members as process_sets[{before}], "
                    f"{ps.ranks}: give each set once"
                )
    for ps in added:
        add_process_set(ps)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a set up. All ranks of the world call this, in the same order, members or not.

    False for the global set and for a set that is not part of the world. Raises, on every rank,
    MismatchError if the ranks do not name the same set, and InvalidArgumentError if a member has
    operations of the set that are pending: wait for them first.
    """
    world = current()
    number = process_set.process_set_id
    membership = process_set._membership if number else None
    pending = membership.engine.pending() if membership is not None else 0
    everybody = _agree(("remove_process_set", number, process_set.ranks), pending)
    busy = [str(rank) for rank, count in enumerate(everybody) if count]
    if busy:
        raise InvalidArgumentError(
            f"{process_set} cannot be removed: rank {', '.join(busy)} has operations of it pending"
        )
    if not number:
        return False
    if membership is not None:
        _native.publish(number, None)
        world.dissolve(membership.engine)
    world.sets.by_id.pop(number)._forget()
    return True


def number_of(process_set: Group | None) -> int:
    """Return the number by which ops inside graphs name a set of this rank's; 0: None, the world.

    Raises InvalidArgumentError if ``process_set`` is no ProcessSet, and for all that ``membership``
    does.
    """
    if process_set is None:
        return 0
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    process_set.membership()
    return process_set.process_set_id or 0


def _check_new(added: ProcessSet, world: World) -> None:
    if added.ranks[-1:] and added.ranks[-1] >= world.size:
        raise InvalidArgumentError(
            f"process set {added.ranks}: rank {added.ranks[-1]} is not in 0..{world.size - 1}"
        )
    if added.process_set_id is not None:
        raise InvalidArgumentError(f"{added} is part of the world already")
    for other in (global_process_set, *world.sets.by_id.values()):
        if other.ranks == added.ranks:
            raise InvalidArgumentError(
                f"process set {added.ranks} has the same members as {other}: use that"
            )


def _agree(call: tuple[Any, ...], facts: Any = None) -> list[Any]:
    """Every rank's ``facts``, once it is sure that all ranks make the same ``call``."""
    answers = _exchange((call, facts))
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise MismatchError(
                f"process sets: rank 0 calls {_text(answers[0][0])}, rank {rank} {_text(other)}: "
                "all ranks add and remove the same sets in the same order"
            )
    return [given for _, given in answers]


def _text(call: tuple[Any, ...]) -> str:
    return f"{call[0]}({call[-1]})"


def _exchange(value: Any) -> list[Any]:
    return _objects.allgather_object(value, _NAME)

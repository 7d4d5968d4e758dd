"""Rounds, in which ranks combine what they have of all optimizers' gradients.

All ranks take part in every round: at the end of a backward pass, or in ``step``. Ranks need not
come with the same optimizers: a backward pass may reach other parts of a model on each rank, or one
rank has no batch. So they first tell each other, in one small reduction, which optimizers they have
come with, and each takes part in what any of them has come with. Hence no rank waits for one that
waits for another optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch

from kolovod import _native
from kolovod.core import spans
from kolovod.core.objects import Objects
from kolovod.core.ops import Max
from kolovod.core.transaction import transaction
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError, MismatchError
from kolovod.gradients import sentinel
from kolovod.gradients.agreement import Agreement
from kolovod.torch.buckets import Bucket
from kolovod.torch.step_state import (
    AGAIN,
    ANEW,
    DROPS,
    FACTS,
    HAS,
    LACKS,
    LOST,
    MARKS,
    PASSES,
    STEPS,
    Offer,
)

if TYPE_CHECKING:
    from kolovod.torch.reducer import GradientReducer

_HEAD = 2  # bytes: has a rank something to say, is one at the end of a backward pass

Stores = list[Callable[[], None]]
"""Functions that put results in their places, when all ranks have them."""


@dataclass(eq=False)
class Part:
    """One optimizer in a round, on this rank."""

    reducer: GradientReducer
    offer: Offer
    problems: list[InvalidArgumentError]
    aside: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that are sums over all ranks already; see ``StepState.set_sums_aside``."""
    is_combined: bool = False
    """Some rank had come with it."""


@dataclass(eq=False)
class _Member:
    """An optimizer that ranks have agreed upon, in the world of one engine."""

    reducer: weakref.ref[GradientReducer]
    count: int
    """The number of its parameters."""

    def of_lost(self) -> bytearray:
        """Return the marks of a rank that has given the optimizer up."""
        marks = bytearray(MARKS + self.count)
        marks[LOST] = 1
        return marks


class _Entry(NamedTuple):
    """One optimizer in a round, whether this rank still has it or not."""

    member: _Member
    part: Part | None
    """None: this rank has given the optimizer up."""
    buckets: Sequence[Bucket]


class _Active(NamedTuple):
    """One optimizer that some rank has come with to a round."""

    member: _Member
    part: Part
    buckets: Sequence[Bucket]
    marks: bytearray
    """What all ranks say of it."""


_lock = threading.Lock()
_numbers = itertools.count()
_all: weakref.WeakValueDictionary[int, GradientReducer] = weakref.WeakValueDictionary()
_in_round: weakref.WeakKeyDictionary[_native.Engine, threading.Thread] = weakref.WeakKeyDictionary()
_members: weakref.WeakKeyDictionary[_native.Engine, list[_Member]] = weakref.WeakKeyDictionary()
"""In the order of their agreement, which is the same on all ranks."""


def enlist(reducer: GradientReducer) -> None:
    """Let ``reducer`` take part, as long as it lives."""
    with _lock:
        _all[next(_numbers)] = reducer


def everyone() -> list[GradientReducer]:
    """All reducers of this process, in the order in which they were made."""
    with _lock:
        return [reducer for _, reducer in sorted(_all.items())]


@contextlib.contextmanager
def _alone(engine: _native.Engine) -> Iterator[None]:
    """Within this context no other thread has a round of ``engine``: that ends the world.

    On another rank the two threads may come in the other order, so that one's gradients meet the
    other's: an error on this rank alone would come too late there.
    """
    mine = threading.current_thread()
    with _lock:
        is_outermost = engine not in _in_round  # a hook may run backward of another model
        other = _in_round.setdefault(engine, mine)
    if other is not mine:
        engine.refuse(
            f"two threads of one process, {other.name} and {mine.name}, average gradients among "
            "the same ranks at the same time, and ranks cannot tell one's from the other's: let "
            "one thread at a time call backward() and step(), in the same order on all ranks, or "
            "train each model in processes of its own"
        )
    try:
        yield
    finally:
        with _lock:
            if is_outermost:
                _in_round.pop(engine, None)


def combine(purposes: Mapping[GradientReducer, int]) -> None:
    """Combine gradients, of these optimizers and of those that other ranks come with.

    All are among the same ranks. Raises on every rank what is wrong on any.
    """
    with _alone(next(iter(purposes)).verbs.world().engine):
        _combine(purposes)


def _combine(purposes: Mapping[GradientReducer, int]) -> None:
    is_first = all(reducer.state.count == 0 for reducer in purposes)
    parts: dict[GradientReducer, Part] = {}
    with spans.span(spans.WAIT_FOR_GRADIENTS):
        try:
            stores = transaction().run(
                lambda: _attempt(purposes, parts),
                counts=is_first,
                is_repeatable=transaction().keeps_gradients,
            )
            for store in stores:
                store()
        finally:
            for part in parts.values():
                part.reducer.end_round(part)
    for part in parts.values():
        if part.is_combined:
            part.reducer.state.close()


def drop(reducer: GradientReducer) -> None:
    """Bring back what backward has sent before it failed, and use nothing of it."""
    parts: dict[GradientReducer, Part] = {}
    try:
        _attempt({reducer: DROPS}, parts)
    finally:
        for part in parts.values():
            part.reducer.end_round(part)


def _attempt(purposes: Mapping[GradientReducer, int], parts: dict[GradientReducer, Part]) -> Stores:
    """Send all, and wait for it; in an elastic job once more if a rank is lost meanwhile."""
    for reducer, purpose in purposes.items():
        if reducer not in parts:
            parts[reducer] = reducer.begin_round(purpose)
    here = [parts[reducer] for reducer in purposes if reducer.follow_world()]
    if not here:  # no other rank is left
        for part in parts.values():
            part.is_combined = True
        return []
    try:
        return _Round(here[0].reducer, parts).stores(here)
    except CollectiveAbortedError:
        for part in parts.values():
            part.reducer.give_up()
        raise


class _Round:
    """A round of all optimizers, in one world."""

    def __init__(self, one: GradientReducer, parts: dict[GradientReducer, Part]) -> None:
        """``one``: of its optimizers. ``parts`` gets this rank's of those it has not come with."""
        self._verbs, self._world = one.verbs, one.verbs.world()
        self._process_set = one.spec.process_set
        self._engine = self._world.engine
        self._members = _members.setdefault(self._engine, [])
        self._parts = parts

    def stores(self, here: Sequence[Part]) -> Stores:
        """Run the round; see ``Stores``. ``here``: what this rank has come with."""
        met = {member.reducer() for member in self._members}
        fresh = [part for part in here if part.reducer not in met]
        for part in fresh:
            part.reducer.in_flight.discard()  # of an earlier world
        some_fresh, stores = self._combine(self._entries(self._members), "known", bool(fresh))
        if some_fresh:
            stores += self._combine(self._entries(self._meet(fresh)), "new")[1]
        return stores

    def _entries(self, members: Iterable[_Member]) -> list[_Entry]:
        parts = ((member, self._part_of(member)) for member in members)
        return [_Entry(m, part, part.reducer.buckets.agreed() if part else ()) for m, part in parts]

    def _combine(
        self, entries: Sequence[_Entry], name: str, says: bool = False
    ) -> tuple[bool, Stores]:
        """Combine the gradients of ``entries``. Returns whether any rank ``says`` something."""
        head, active = self._tell(entries, name, says)
        for _, part, buckets, marks in active:
            part.is_combined = True
            if not marks[LOST]:
                part.reducer.follow(part, buckets, marks)
        landed = [None if m[LOST] else part.reducer.arrived() for _, part, _, m in active]
        for _, part, _, _ in active:
            if part.problems:
                raise part.problems[0]
        stores: Stores = []
        again: list[_Member] = []
        for (member, part, _, marks), results in zip(active, landed, strict=True):
            reducer = part.reducer
            if part.offer.purpose == DROPS:
                continue
            reducer.state.check(marks)
            assert results is not None
            if not head[1]:  # all are in step(), of other optimizers maybe: nobody has more before
                marks[LACKS] = 0
            stores += reducer.landed(*results, marks)
            if marks[AGAIN]:
                again.append(member)
            elif marks[ANEW]:
                reducer.bucket_settings.make_anew()
        for _, part, _, marks in active:
            self._compare(part.reducer, marks)
        if again:
            more = [self._further(member) for member in again]
            stores += self._combine(more, "further parameters")[1]
        return bool(head[0]), stores

    def _compare(self, reducer: GradientReducer, marks: bytearray) -> None:
        """Say what ranks have not alike, and who has gradients that are not finite."""
        watch = reducer.sentinel
        if watch is None:
            return
        of_set = self._process_set
        ranks = range(self._world.size) if of_set is None else of_set.ranks
        watch.note_health(marks, FACTS, MARKS, ranks)
        if watch.is_late:  # the optimizer has stepped with them
            watch.tell_health(self._verbs.world)
        kinds = watch.differences(marks, FACTS)
        if kinds:
            said = Objects(self._verbs.world).allgather_object(
                watch.facts(), "optimizer.differences"
            )
            text = sentinel.text_of(kinds, said, watch.like(ranks))
            sentinel.tell(text, is_first=self._world.rank == 0)

    def _tell(
        self, entries: Sequence[_Entry], name: str, says: bool
    ) -> tuple[bytearray, list[_Active]]:
        """Send what this rank has, and tell the others of what.

        Returns what all say: the head, and of the ``entries`` that some rank has come with.
        """
        # A rank that is not in step() may run backward before it comes to the next round.
        is_in_pass = any(part.offer.purpose == PASSES for part in self._parts.values())
        said = bytearray([says, is_in_pass])
        for member, part, buckets in entries:
            said += part.reducer.depart(part, buckets, member.count) if part else member.of_lost()
        view = torch.frombuffer(said, dtype=torch.uint8)
        self._verbs.allreduce_(view, f"gradients.of {name} optimizers", Max)
        active: list[_Active] = []
        begin = _HEAD
        for member, part, buckets in entries:
            marks = said[begin : begin + MARKS + member.count]
            begin += len(marks)
            if not marks[HAS]:
                self._members.remove(member)
            elif marks[PASSES] or marks[STEPS] or marks[DROPS]:
                if part is None:
                    raise MismatchError(
                        "another rank averages gradients of an optimizer that this one has given "
                        "up: all ranks must use the same optimizers, and drop them at the same "
                        "place"
                    )
                active.append(_Active(member, part, buckets, marks))
        return said[:_HEAD], active

    def _further(self, member: _Member) -> _Entry:
        """Agree upon what is new of ``member``, which needs a second trip."""
        part = self._part_of(member)
        assert part is not None
        buckets = part.reducer.agree_further()
        member.count = len(part.reducer.parameters)
        return _Entry(member, replace(part, offer=Offer(STEPS, sends_all=True)), buckets)

    def _part_of(self, member: _Member) -> Part | None:
        """Return this rank's part of ``member``; None: it has given the optimizer up."""
        reducer = member.reducer()
        if reducer is None or reducer.is_closed:
            return None
        if reducer not in self._parts:
            self._parts[reducer] = reducer.begin_round(None)
        return self._parts[reducer]

    def _meet(self, fresh: Sequence[Part]) -> list[_Member]:
        """Agree upon the optimizers that some rank has come with for the first time.

        Where several have equal parameters (two heads, say) it counts in which order they were
        made; and where ranks have made differently many, which of them ranks have come with.
        """
        unmet = self._unmet()
        here = [part.reducer for part in fresh]
        mine = [(digest, reducer in here) for digest, reducer in unmet]
        said = Objects(self._verbs.world).allgather_object(mine, "gradients.new optimizers")
        met: list[_Member] = []
        wanted = (digest for theirs in said for digest, is_here in theirs if is_here)
        for digest in dict.fromkeys(wanted):
            marks = [[is_here for d, is_here in theirs if d == digest] for theirs in said]
            equal = [reducer for d, reducer in unmet if d == digest]
            if len({len(theirs) for theirs in marks}) == 1:
                chosen = [r for r, *each in zip(equal, *marks, strict=True) if any(each)]
            elif len({sum(theirs) for theirs in marks}) == 1:
                chosen = [reducer for reducer in equal if reducer in here]
            else:
                self._refuse([r for r in here if all(m.reducer() is not r for m in met)])
            for reducer in chosen:
                reducer.meet()
                met.append(_Member(weakref.ref(reducer), len(reducer.parameters)))
        self._members += met
        return met

    def _refuse(self, here: Sequence[GradientReducer]) -> NoReturn:
        """Raise an error that says how the ranks' optimizers differ in their parameters."""
        agreement = Agreement(self._verbs.world, self._process_set)
        agreement.reach(here[0].details() if here else [])
        raise MismatchError(
            "ranks have made differently many optimizers of parameters with the same names and "
            "shapes, and come with some of them only: give each named_parameters of its own"
        )

    def _unmet(self) -> list[tuple[bytes, GradientReducer]]:
        """Return reducers that ranks have not agreed upon in this world, each with its digest.

        It is by the digest that ranks know which of them are the same.
        """
        met = {member.reducer() for member in self._members}
        return [
            (reducer.parameters.digest(), reducer)
            for reducer in everyone()
            if reducer.hooks.are_on and reducer not in met and reducer.is_in(self._engine)
        ]

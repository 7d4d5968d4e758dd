"""The verbs: one row each.

A row says what the engine knows of the verb (csrc/base/verb_traits.h), in which forms it comes, and
what its derivative is. The derivatives of all frameworks and the names that the front ends export
follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from kolovod import _native

__all__ = [
    "ALLGATHER",
    "ALLREDUCE",
    "ALLTOALL",
    "BARRIER",
    "BROADCAST",
    "JOIN",
    "RECV",
    "REDUCESCATTER",
    "SEND",
    "VERBS",
    "Adjoint",
    "Then",
    "Verb",
]


class Then(Enum):
    """A step that is left to do with the result of a backward operation."""

    NOTHING = 0
    ZERO_UNLESS_ROOT = 1
    """Zeros on all ranks but the root."""
    TAKE_OWN_ROWS = 2
    """The rows that this rank had given."""
    PAD_WITH_ZEROS = 3
    """Zeros for the rows that stayed on this rank."""
    SCALE = 4
    """Times both factors, and for Average divided by the number of ranks."""


@dataclass(frozen=True, slots=True)
class Adjoint:
    """The operation that carries gradients back the way that the tensors came."""

    verb: str
    reduces_alike: bool = False
    """True: it has the op and the factors of the verb itself; else Sum, without factors."""
    then: Then = Then.NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """One row of the table."""

    name: str
    number: int
    """The engine's number for it."""
    reduces: bool = False
    """It does arithmetic; then only Average and Sum are linear."""
    makes_outputs: bool = False
    """Results have another first dimension than what is given, so the engine makes them."""
    adjoint: Adjoint | None = None
    grouped: bool = False
    """Several tensors can be one operation."""
    in_place: bool = False
    """Results can take the place of what is given."""

    @property
    def forms(self) -> tuple[str, ...]:
        """The names under which front ends export it."""
        if self.adjoint is None:
            return (self.name,)
        names = [self.name, *([f"grouped_{self.name}"] if self.grouped else [])]
        ends = ("", "_async", "_", "_async_") if self.in_place else ("", "_async")
        return tuple(name + end for name in names for end in ends)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:
        """Stay one object each: verbs are compared by identity."""
        return _named, (self.name,)


def _named(name: str) -> Verb:
    return VERBS[name]


VERBS: dict[str, Verb] = {}


def _verb(name: str, adjoint: Adjoint | None = None, **forms: bool) -> Verb:
    known = _native.VERB_TRAITS[name]
    numbers = known["number"], known["reduces"], known["makes_outputs"]
    verb = VERBS[name] = Verb(name, *numbers, adjoint, **forms)
    return verb


ALLREDUCE = _verb(
    "allreduce", Adjoint("allreduce", reduces_alike=True), grouped=True, in_place=True
)
BROADCAST = _verb("broadcast", Adjoint("allreduce", then=Then.ZERO_UNLESS_ROOT), in_place=True)
ALLGATHER = _verb("allgather", Adjoint("allreduce", then=Then.TAKE_OWN_ROWS), grouped=True)
ALLTOALL = _verb("alltoall", Adjoint("alltoall", then=Then.PAD_WITH_ZEROS))
REDUCESCATTER = _verb("reducescatter", Adjoint("allgather", then=Then.SCALE), grouped=True)
BARRIER = _verb("barrier")
JOIN = _verb("join")
SEND = _verb("send")
RECV = _verb("recv")

"""Values of a State by which ranks train independently: they step alone and exchange seldom.

Between exchanges ranks differ and no ticket is passed (steps.py), so there a commit says nothing,
and what a rank that joins is given must leave the others' own steps alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from kolovod.errors import ElasticArgumentError

__all__ = ["IndependentTraining", "check_independent"]


class IndependentTraining(ABC):
    """The interface of local SGD, DiLoCo and the like to a State.

    See ``kolovod.gradients.periodic``.
    """

    @property
    @abstractmethod
    def has_exchanged(self) -> bool:
        """True if all ranks have exchanged something since the last commit."""

    @abstractmethod
    def committed(self) -> None:
        """Note that a commit has been made since the exchange."""

    @abstractmethod
    def enter_world(self) -> None:
        """All ranks are in another world, and call this before any operation of their own there.

        Raises CollectiveAbortedError if a rank is lost meanwhile; MismatchError, on every rank,
        where they differ in what they have been told; InvalidArgumentError for what cannot work in
        an elastic job.
        """

    @abstractmethod
    def drain_exchanges(self) -> Iterator[None]:
        """Have what is on its way arrive, exchange by exchange: the world is to be left.

        Each is a step. Ranks that join are given the results, which are applied when they are due.
        """


def check_independent(
    independent: Sequence[IndependentTraining], samplers: Sequence[Any], *, recomputes: bool
) -> None:
    """Raise InvalidArgumentError for what does not go with ranks that train independently.

    ``samplers``: those in the state beside ``independent``. ``recomputes``: see ``elastic.run``.
    """
    if not independent:
        return
    kind = type(independent[0]).__name__
    if recomputes:
        raise ElasticArgumentError(
            f'redo is "recompute", but the state has a {kind}, by which a step is an exchange: to '
            "compute one again would be to take all steps again since the one before; it is "
            'repeated from what was kept, so leave out redo="recompute"'
        )
    if samplers:
        raise ElasticArgumentError(
            f"the state has an {type(samplers[0]).__name__} beside a {kind}: it counts samples in "
            "the step that combines their gradients, but between exchanges ranks step by "
            "themselves; let the samples of a process follow from its number "
            "(MembershipLog.member) and from how many steps it has taken"
        )

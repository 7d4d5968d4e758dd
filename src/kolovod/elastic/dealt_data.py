"""The interface of samplers and streams to a State: data that are dealt to ranks that change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import closing
from typing import Any, TypeVar

__all__ = ["DealtData", "hold"]

V = TypeVar("V")
R = TypeVar("R")


def hold(talk: Generator[V, list[V], R], allgather: Callable[[V], list[V]]) -> R:
    """Gather what ``talk`` yields and give it the lists, to its end; return what it returns."""
    gathered: Any = None
    with closing(talk):
        while True:
            try:
                value = talk.send(gathered)
            except StopIteration as end:
                result: R = end.value
                return result
            gathered = allgather(value)


class DealtData(ABC):
    """Data of which each rank takes a part, while ranks come and go."""

    @abstractmethod
    def record_step(self, members: Collection[int] | None = None) -> None:
        """Note that a step is done: on all ranks, after each; see ElasticSampler."""

    @property
    def is_due(self) -> bool:
        """True if ``changed`` is to be called although the ranks are the same: on all ranks."""
        return False

    @abstractmethod
    def changed(
        self, member: int, allgather: Callable[[Any], list[Any]], *, takes_part: bool = True
    ) -> None:
        """Share what is left of the epoch among other ranks: on all ranks; see ElasticSampler."""

    @abstractmethod
    def exchange(self, member: int, *, takes_part: bool = True) -> Generator[Any, list[Any], None]:
        """Do as ``changed`` does, for a caller without a function that waits.

        Yields what is to be gathered.
        """

    @abstractmethod
    def keep(self) -> Callable[[], None]:
        """Return what makes the place in the data again what it is now, after a commit."""

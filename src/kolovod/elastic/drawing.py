"""The iterations over a sampler: index by index, and batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kolovod.errors import ElasticArgumentError

__all__ = ["Batches", "Drawn", "Draws", "Indices", "Lists"]


class Drawn(NamedTuple):
    """A batch that was drawn."""

    indices: list[int]
    has_weight: bool
    """Whether its samples count."""
    is_followed: bool
    """Whether another one follows, as things are now."""


class Draws:
    """An iteration, which stays at its end, as iterators do."""

    def __init__(
        self, start: Callable[[Draws], None], draw: Callable[[Draws], Drawn | None]
    ) -> None:
        """``start``: called once, now. ``draw``: the next batch; None at the end."""
        self._draw = draw
        self._is_over = False
        start(self)

    def _next(self) -> Drawn:
        drawn = None if self._is_over else self._draw(self)
        if drawn is None:
            self._is_over = True
            raise StopIteration
        return drawn


class Lists(Draws):
    """An iteration over batches."""

    def __iter__(self) -> Iterator[list[int]]:
        """Return itself."""
        return self

    def __next__(self) -> list[int]:
        """Return the next batch."""
        return self._next().indices


class Indices(Draws):
    """An iteration over all batches' indices in a row, of which a loader cuts the same batches."""

    def __init__(
        self,
        start: Callable[[Draws], None],
        draw: Callable[[Draws], Drawn | None],
        batch_size: int,
    ) -> None:
        """``batch_size``: of the loader."""
        super().__init__(start, draw)
        self._batch_size = batch_size
        self._waiting: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Return the next index."""
        if not self._waiting:
            self._waiting.extend(self._filled(self._next()))
        return self._waiting.popleft()

    def _filled(self, drawn: Drawn) -> list[int]:
        missing = self._batch_size - len(drawn.indices)
        if missing <= 0 or not drawn.is_followed:
            return drawn.indices
        if drawn.has_weight:  # drawn as the last one, before the ranks changed
            raise ElasticArgumentError(
                f"a batch of {len(drawn.indices)} comes before others, of which a loader that cuts "
                f"batches of {self._batch_size} would take the rest: a loop has been left early; "
                "give batches() to the loader, as batch_sampler"
            )
        return drawn.indices * self._batch_size  # one, without weight: as often as one likes


class _Counted(Protocol):
    @property
    def steps_done(self) -> int: ...

    @property
    def steps_left(self) -> int: ...

    @property
    def passes(self) -> int: ...


class Batches:
    """A sampler's indices in batches; can be iterated again."""

    def __init__(self, sampler: _Counted, iterate: Callable[[], Iterator[list[int]]]) -> None:
        """``iterate``: begins an iteration."""
        self._sampler, self._iterate = sampler, iterate

    def __len__(self) -> int:
        """Return this rank's number of batches in this epoch, including those that are done."""
        sampler = self._sampler
        return (sampler.steps_done + sampler.steps_left) * sampler.passes

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over them from the first step that is not recorded; what iterated before ends."""
        return self._iterate()

"""The reading of one part of a stream: batch by batch, from its beginning or from a snapshot."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from kolovod.elastic.state import has_state_dict
from kolovod.elastic.streaming import Part, Snapshot
from kolovod.errors import ElasticArgumentError
from kolovod.notices import report_to_stderr

__all__ = ["Make", "Reader", "Reading", "samples_of"]

T = TypeVar("T")

Make = Callable[[int, int, int], Iterable[T]]
"""``make(part, parts, epoch)``: returns the batches of a part, the same whenever it is called."""


class Reading(NamedTuple, Generic[T]):
    """A batch that was read."""

    batch: T
    samples: int


def samples_of(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of the first array in it.

    Where there is none, the length of a list or tuple. Raises InvalidArgumentError for what else it
    may be.
    """
    array = _first_array(batch)
    if array is not None:
        return int(array.shape[0])
    if isinstance(batch, list | tuple):
        return len(batch)
    raise ElasticArgumentError(
        f"a batch is a {type(batch).__name__} without an array in it, so its number of samples is "
        "not known: give ElasticStream samples=, a function of a batch that returns it"
    )


def _first_array(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        arrays = map(_first_array, value)
        return next((array for array in arrays if array is not None), None)
    return value if len(getattr(value, "shape", ())) else None


class Reader(Generic[T]):
    """The batches of a part, of which the last one that was read is at hand."""

    def __init__(
        self, make: Make[T], samples: Callable[[T], int], part: int, parts: int, epoch: int
    ) -> None:
        """Open the part; ``make`` and ``samples``: see ElasticStream."""
        self.part, self.epoch = part, epoch
        self._samples = samples
        self._name = f"part {part} of {parts} in epoch {epoch}"
        self._loader = make(part, parts, epoch)
        if not isinstance(self._loader, Iterable):
            raise ElasticArgumentError(
                f"make has returned a {type(self._loader).__name__} for {self._name}: need "
                "batches that can be iterated over, as a loader has them"
            )
        self.read = 0
        """The number of batches, those that were left out included."""
        self._batches: Iterator[T] | None = None
        self._tells_state = has_state_dict(self._loader)
        self._has_ended = False
        self._hand: Reading[T] | None = None

    def is_at(self, number: int) -> bool:
        """Return whether ``batch(number)`` takes no other reading than of the next one."""
        return number == self.read or (self._hand is not None and number == self.read - 1)

    def go_to(self, progress: Part) -> None:
        """Go to behind the batches that have counted: of a reader that has read nothing yet.

        Raises InvalidArgumentError where the part has fewer.
        """
        snapshot = progress.snapshot
        if snapshot is not None and self._tells_state:
            self._loader.load_state_dict(copy.deepcopy(snapshot.state))  # type: ignore[attr-defined]
            self.read = snapshot.batches
        self._batches = iter(self._loader)
        while self.read < progress.batches:
            if self._next() is None:
                raise ElasticArgumentError(
                    f"{self._name} is at its end after {self.read} batches, but "
                    f"{progress.batches} have counted: make must return the same batches whenever "
                    "it is called with the same arguments, on all ranks"
                )

    def batch(self, number: int) -> Reading[T] | None:
        """Return the ``number``-th batch, the one at hand or the next; None: it is at its end."""
        return self._hand if number == self.read - 1 else self._next()

    def snapshot(self, limit: int) -> Snapshot | None:
        """Return the state of the loader as it is now, if it can tell it.

        ``limit``: the most bytes that it may have as a pickle. Where it has more, or cannot be
        pickled, a line on standard error says so, and it is not asked again.
        """
        if not self._tells_state:
            return None
        try:
            state = pickle.dumps(self._loader.state_dict())  # type: ignore[attr-defined]
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle raises them
            why = f"cannot be pickled ({error})"
        else:
            if len(state) <= limit:
                return Snapshot(self.read, pickle.loads(state))
            why = f"has {len(state)} bytes, more than the {limit} of snapshot_bytes"
        self._tells_state = False
        report_to_stderr(
            f"the state of the loader of {self._name} {why}: whoever goes on with that part reads "
            "it from its beginning"
        )
        return None

    def _next(self) -> Reading[T] | None:
        assert self._batches is not None
        if self._has_ended:
            return None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._has_ended = True
            return None
        samples = self._samples(batch)
        try:
            count = operator.index(samples)
        except TypeError:
            count = -1
        if count < 0:
            raise ElasticArgumentError(
                f"samples has returned {samples!r} for batch {self.read} of {self._name}: need a "
                "whole number, 0 or more"
            )
        self.read += 1
        self._hand = Reading(batch, count)
        return self._hand

"""Interfaces of a foreign engine and of the memory that it works in."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.core.ops import Op

_BOOL = _native.DTYPES["bool"]
# How a bool is combined as the numbers 0 and 1: "or" is their maximum, "and" their minimum.
_BOOL_OPS = {Op.Sum: Op.Max, Op.Product: Op.Min}

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Flat: TypeAlias = Any
"""A dense array of one dimension: NumPy's in host memory, a PyTorch tensor on a GPU."""

Bucket: TypeAlias = dict[str, Any]
"""A bucket, see ``_native.Engine.next_bucket``."""


class Backend(Protocol):
    """The verbs, on flat arrays of its memory; all ranks call the same in turn.

    All are called from one thread, and all know the sizes of all ranks, so that every rank takes
    the same way. What they raise fails the operation, and the world with it.

    The order of additions, and what Min and Max make of a NaN, is the other engine's own. Results
    are the same on every rank if the other engine's are.
    """

    @property
    def memory(self) -> Memory:
        """The memory of its arrays."""
        ...

    def allreduce(self, values: Flat, op: Op) -> None:
        """Combine ``values``, in a dtype that ``memory`` prepares, over all ranks, in place.

        ``op``: Sum, Min, Max or Product.
        """
        ...

    def broadcast(self, values: Flat, root: int) -> None:
        """Overwrite ``values``, bytes, with those of rank ``root``."""
        ...

    def allgather(self, values: Flat, sizes: Sequence[int]) -> Flat:
        """Every rank's bytes in rank order. ``sizes[r]``: bytes of rank r, not all 0."""
        ...

    def alltoall(
        self, values: Flat, sent: Sequence[int], received: Sequence[int], total: int
    ) -> Flat:
        """Return the parts that all ranks have for this one, in rank order.

        ``values`` holds this rank's parts for rank 0, 1, ... in turn. ``sent[d]``: bytes of its
        part for rank d; ``received[s]``: of rank s's part for this one; ``total``: of all parts of
        all ranks, the same everywhere and not 0.
        """
        ...

    def reducescatter(self, values: Flat, op: Op, counts: Sequence[int]) -> Flat:
        """The part of this rank in what allreduce would give; ``values`` may be overwritten.

        ``counts[r]``: elements of rank r's part, not all 0; the parts follow each other in rank
        order.
        """
        ...

    def close(self, *, is_healthy: bool) -> None:
        """Give up what the engine holds; nothing is called after it.

        ``is_healthy``: the world has ended as it should, so this may take the time that other
        ranks' last operations need; else it waits for no other rank.
        """
        ...


@dataclass(frozen=True)
class Reduction(abc.ABC):
    """One allreduce or reducescatter, in what a Backend can carry: before it, and after it."""

    dtype: int
    op: Op
    prescale: float
    postscale: float
    size: int
    """The number of ranks."""

    @property
    def carried_op(self) -> Op:
        """The op that the Backend is asked for."""
        if self.dtype == _BOOL:
            return _BOOL_OPS.get(self.op, self.op)
        return Op.Sum if self.op is Op.Average else self.op

    @abc.abstractmethod
    def prepared(self, values: Flat) -> Flat:
        """Stored values, scaled and in a dtype that the Backend can add."""

    @abc.abstractmethod
    def finished(self, values: Flat) -> Flat:
        """Return the Backend's result divided, scaled and as it is stored."""


class Memory(Protocol):
    """The memory that tensors are in, which a Carrier reads and writes by address."""

    reduction: type[Reduction]
    """The arithmetic there is on its arrays."""

    makes_outputs: bool
    """True: a result whose size only all ranks together know is a new array of this memory; else
    the engine has made the place for it."""

    def work(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Return a context for all that is done for one bucket."""
        ...

    def read(self, pieces: Sequence[tuple[int, int]], dtype: int) -> Flat:
        """Copies of (address, number of elements), one after the other, there on return."""
        ...

    def write(self, pieces: Sequence[tuple[int, int]], values: Flat) -> None:
        """Cut ``values`` and put them there, before this returns."""
        ...

    def settle(self, look: Callable[[], None]) -> None:
        """Return when the backend is done; call ``look`` meanwhile, which may raise."""
        ...

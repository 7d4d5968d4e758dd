"""What an engine of somebody else owes us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kolovod.core.ops import Op

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Backend(Protocol):
    """The verbs, on dense arrays of one dimension in host memory; all ranks call the same in turn.

    All are called from one thread, and all know the sizes of all ranks, so that every rank takes
    the same way. What they raise fails the operation, and the world with it.

    The order of additions, and what Min and Max make of a NaN, is the other engine's own. Results
    are the same on every rank if the other engine's are.
    """

    def allreduce(self, values: Array, op: Op) -> None:
        """Combine ``values`` (integers, float32 or float64) over all ranks, in place.

        ``op``: Sum, Min, Max or Product.
        """
        ...

    def broadcast(self, values: Bytes, root: int) -> None:
        """Overwrite ``values`` with those of rank ``root``."""
        ...

    def allgather(self, values: Bytes, sizes: Sequence[int]) -> Bytes:
        """Every rank's values in rank order. ``sizes[r]``: bytes of rank r, not all 0."""
        ...

    def alltoall(
        self, values: Bytes, sent: Sequence[int], received: Sequence[int], total: int
    ) -> Bytes:
        """What every rank has for this one, in rank order.

        ``values`` holds this rank's parts for rank 0, 1, ... in turn. ``sent[d]``: bytes of its
        part for rank d; ``received[s]``: of rank s's part for this one; ``total``: of all parts of
        all ranks, the same everywhere and not 0.
        """
        ...

    def reducescatter(self, values: Array, op: Op, counts: Sequence[int]) -> Array:
        """The part of this rank in what allreduce would give; ``values`` may be overwritten.

        ``counts[r]``: elements of rank r's part, not all 0; the parts follow each other in rank
        order.
        """
        ...

    def close(self) -> None:
        """Give up what the engine holds; nothing is called after it. Waits for no other rank."""
        ...

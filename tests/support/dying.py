"""A rank that is killed when what was before is complete on all ranks.

An operation completes on each rank by itself: who has its result and dies at once may take another
rank's with it, whose error comes earlier then than a test expects.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

_begun: list[Any] = []


def die(rank: int, victim: int, begin: Callable[[], Any] | None = None) -> None:
    """Kill rank ``victim`` once all ranks have come here; the others go on at once.

    ``begin()``: begins an operation of all ranks, and returns its handle; by default one of NumPy.
    """
    handle = _one() if begin is None else begin()
    if rank == victim:
        handle.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    _begun.append(handle)  # whether it completes here is of no interest


def _one() -> Any:
    import numpy as np

    import kolovod.numpy as kv

    return kv.allreduce_async(np.ones(1), name="all are here")

"""Tensors in host memory: flat NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kolovod.backends.base import Array, Bucket, Reduction
from kolovod.backends.host_arithmetic import STORED, HostReduction


class HostMemory:
    """The host's memory; see ``Memory``."""

    reduction: type[Reduction] = HostReduction
    makes_outputs = False

    def work(self, bucket: Bucket) -> AbstractContextManager[None]:
        """Implement ``Memory.work``."""
        return nullcontext()

    def read(self, pieces: Sequence[tuple[int, int]], dtype: int) -> Array:
        """Implement ``Memory.read``."""
        arrays = [_array(address, count, STORED[dtype]) for address, count in pieces]
        return np.concatenate(arrays)

    def write(self, pieces: Sequence[tuple[int, int]], values: Array) -> None:
        """Implement ``Memory.write``."""
        start = 0
        for address, count in pieces:
            _array(address, count, values.dtype)[...] = values[start : start + count]
            start += count

    def settle(self, look: Callable[[], None]) -> None:
        """Implement ``Memory.settle``: an operation that has returned is done."""


def _array(address: int, count: int, dtype: np.dtype[Any]) -> Array:
    """The memory at ``address`` as an array, valid while the bucket's memory is open."""
    if count == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    array: Array = np.frombuffer(memoryview(memory), dtype)
    return array

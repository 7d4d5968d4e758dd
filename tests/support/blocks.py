"""What the engine's codecs make of numbers (csrc/collectives/codec.h), in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HOSTS = ["a", "b"]
ROWS, COLUMNS = 60, 35
TOPS = {"int8": 127, "int4": 7}
GROUPS = {"int8": 256, "int4": 64}
"""How many elements share a scale."""

Floats = npt.NDArray[np.float32]


def coded(values: npt.NDArray[Any], codec: str) -> Floats:
    """``values``, finite, each the nearest whole number of its group's scale; of the same shape."""
    flat = np.asarray(values, np.float32).ravel()
    groups = np.pad(flat, (0, -flat.size % GROUPS[codec])).reshape(-1, GROUPS[codec])
    largest = np.abs(groups).max(axis=1, keepdims=True)
    top = np.float32(TOPS[codec])
    if codec == "int4":  # as bfloat16, rounded to zero
        largest = (largest.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    scale = largest / top if codec == "int8" else largest * (np.float32(1) / top)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, top / largest, np.float32(0))
    whole = np.rint(groups * inverse) * scale
    return whole.ravel()[: flat.size].reshape(np.shape(values)).astype(np.float32)


def reduced(
    of_ranks: Sequence[npt.NDArray[Any]], hosts: Sequence[str], codec: str, divisor: int = 1
) -> Floats:
    """An allreduce of ``of_ranks`` whose hosts exchange encoded sums; see ``coded``."""
    sums: dict[str, Floats] = {}
    for values, host in zip(of_ranks, hosts, strict=True):
        mine = np.asarray(values, np.float32)
        sums[host] = sums[host] + mine if host in sums else mine
    total: Any = np.float32(0)
    for each in sums.values():
        total = total + coded(each, codec)
    return coded(total / np.float32(divisor), codec)


def matrix(rank: int) -> Floats:
    """The gradient of what is encoded, on one rank."""
    return np.random.default_rng([rank, 1]).normal(size=(ROWS, COLUMNS)).astype(np.float32)


def bias(rank: int) -> Floats:
    """The gradient of what is not."""
    return np.random.default_rng([rank, 2]).normal(size=2_000).astype(np.float32)


def average_of(make: Callable[[int], Floats], codec: str | None = None) -> Floats:
    """What both ranks come to; ``codec`` None: it is sent as it is."""
    both = [make(rank) for rank in range(2)]
    if codec is None:
        return (both[0] + both[1]) / np.float32(2)
    return reduced(both, HOSTS, codec, 2)


def check(averaged: Any, biases: Any, codec: str | None) -> None:
    """Both averages are right; ``codec`` None: of a matrix that is excluded."""
    assert np.array_equal(np.asarray(averaged), average_of(matrix, codec))
    assert np.array_equal(np.asarray(biases), average_of(bias))

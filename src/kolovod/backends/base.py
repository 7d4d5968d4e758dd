"""What an engine of somebody else owes us, and the thread that drives it.

The trip of a bucket: the native engine decides it [1]; ``ExternalDriver`` lines its tensors up in
one array, scaled and in a dtype that every engine can add [2]; the Backend works on that array in
place [3]; the driver scales, converts and puts the values where they belong [4].
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.ops import Op

Array = npt.NDArray[Any]

_ALLREDUCE = _native.VERBS["allreduce"]
_BFLOAT16 = _native.DTYPES["bfloat16"]
_BOOL = _native.DTYPES["bool"]
# bfloat16 and bool are moved as the bits they are stored in.
_STORED = {
    code: np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(name, name))
    for name, code in _native.DTYPES.items()
}
# How a bool is combined as the numbers 0 and 1: "or" is their maximum, "and" their minimum.
_BOOL_OPS = {Op.Sum: Op.Max, Op.Product: Op.Min}
_JOIN_S = 5.0

Piece = tuple[int, int, int]  # input address, output address, elements


class Backend(Protocol):
    """The verbs, on one dense array in host memory, in place; every rank calls the same in turn.

    The order of additions, and what Min and Max make of a NaN, is the other engine's own.
    """

    def allreduce(self, values: Array, op: Op) -> None:
        """Combine ``values`` (one dimension, integers, float32 or float64) over all ranks.

        ``op``: Sum, Min, Max or Product. Raises what the other engine raises; the operation then
        fails, and the world with it.
        """
        ...

    def broadcast(self, values: npt.NDArray[np.uint8], root: int) -> None:
        """Overwrite the bytes ``values`` with those of rank ``root``."""
        ...


class ExternalDriver:
    """A thread that takes buckets from ``engine`` and lets ``backend`` carry them."""

    def __init__(self, engine: _native.Engine, backend: Backend, size: int) -> None:
        """``engine`` was made with ``external=True``; ``size``: ranks in the world."""
        self._engine = engine
        self._backend = backend
        self._size = size
        self._stopping = threading.Event()
        # A daemon: a call into a foreign engine whose peer died may never return.
        self._thread = threading.Thread(target=self._serve, name="kolovod-backend", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End after the bucket at hand; call it after ``engine.shutdown()``."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                bucket = self._engine.next_bucket(0.5)  # [1]
                if bucket is not None:
                    self._engine.bucket_done(bucket["token"], self._carry(bucket))
            except _native.EngineError:
                return  # shut down, or the world was aborted

    def _carry(self, bucket: dict[str, Any]) -> str:
        """Do one bucket; returns why it failed, or nothing."""
        try:
            if bucket["verb"] == _ALLREDUCE:
                self._allreduce(bucket)
            else:
                self._broadcast(bucket)
        except _native.EngineError:
            raise  # given up while it was on its way
        except Exception as error:  # of a library that we do not know
            return f"{type(error).__name__}: {error}"
        return ""

    def _allreduce(self, bucket: dict[str, Any]) -> None:
        dtype: int = bucket["dtype"]
        op = Op(bucket["op"])
        pieces: Sequence[Piece] = bucket["tensors"]
        stored = _STORED[dtype]
        with self._memory(bucket):
            values = np.concatenate([_array(source, count, stored) for source, _, count in pieces])
        values = _scaled(_widened(values, dtype), bucket["prescale"], dtype)  # [2]
        if op is Op.Average and values.dtype.kind in "iu":
            values = values.astype(np.int64)  # the sum must not wrap before it is divided
        carried = _BOOL_OPS.get(op, op) if dtype == _BOOL else op
        self._backend.allreduce(values, Op.Sum if carried is Op.Average else carried)  # [3]
        divisor = self._size if op is Op.Average else 1
        values = _narrowed(_finished(values, divisor, bucket["postscale"], dtype), dtype)  # [4]
        start = 0
        with self._memory(bucket):
            for _, target, count in pieces:
                _array(target, count, stored)[...] = values[start : start + count]
                start += count

    def _broadcast(self, bucket: dict[str, Any]) -> None:
        item_size = _STORED[bucket["dtype"]].itemsize
        for source, target, count in bucket["tensors"]:
            with self._memory(bucket):
                values = _array(source, count * item_size, np.dtype(np.uint8)).copy()
            self._backend.broadcast(values, bucket["root"])
            with self._memory(bucket):
                _array(target, count * item_size, np.dtype(np.uint8))[...] = values

    @contextlib.contextmanager
    def _memory(self, bucket: dict[str, Any]) -> Iterator[None]:
        """While the tensors' memory is touched; never during a call into the other engine.

        Such a call may outlast the bucket: when a rank dies, the operation fails at once, and its
        tensors may be freed while the call still waits for the dead.
        """
        self._engine.open_bucket(bucket["token"])
        try:
            yield
        finally:
            self._engine.close_bucket()


def _array(address: int, count: int, dtype: np.dtype[Any]) -> Array:
    """The memory at ``address`` as an array, valid while the bucket's memory is open."""
    if count == 0:
        return np.empty(0, dtype)
    memory = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(address)
    array: Array = np.frombuffer(memoryview(memory), dtype)
    return array


def _widened(values: Array, dtype: int) -> Array:
    """16-bit floats as float32, bools as 0 and 1."""
    widened = values
    if dtype == _BFLOAT16:
        widened = np.left_shift(values.astype(np.uint32), 16).view(np.float32)
    elif dtype == _BOOL:
        widened = np.not_equal(values, 0).astype(np.uint8)
    elif values.dtype == np.float16:
        widened = values.astype(np.float32)
    return widened


def _narrowed(values: Array, dtype: int) -> Array:
    """The opposite, rounding to nearest, ties to even; a NaN stays one."""
    if dtype == _BFLOAT16:
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return values.astype(_STORED[dtype], copy=False)


def _scaled(values: Array, factor: float, dtype: int) -> Array:
    """``factor * values``, rounded to the dtype it is stored in (integers: toward zero)."""
    if factor == 1.0:
        return values
    if values.dtype.kind == "f":
        scaled = (values * values.dtype.type(factor)).astype(values.dtype)
        return _widened(_narrowed(scaled, dtype), dtype)
    return _truncated(values * np.float64(factor), values.dtype)


def _finished(values: Array, divisor: int, factor: float, dtype: int) -> Array:
    """``values / divisor * factor``; integers are truncated toward zero, once."""
    if divisor == 1 and factor == 1.0:
        return values
    if values.dtype.kind == "f":
        quotient: Array = values / values.dtype.type(divisor) * values.dtype.type(factor)
        return quotient.astype(values.dtype, copy=False)
    if factor == 1.0:
        wide = values.astype(np.int64)  # exact, where a division in float64 would not be
        whole: Array = (wide - np.fmod(wide, divisor)) // divisor
        return whole.astype(values.dtype)
    return _truncated(values / np.float64(divisor) * factor, _STORED[dtype])


def _truncated(values: Array, dtype: np.dtype[Any]) -> Array:
    """Toward zero, clamped to what ``dtype`` can hold; NaN becomes 0."""
    limits = np.iinfo(dtype)
    too_big = values >= float(limits.max)
    too_small = values <= float(limits.min)
    inside = np.where(too_big | too_small | np.isnan(values), 0, values)
    result: Array = inside.astype(dtype)
    result[too_big] = limits.max
    result[too_small] = limits.min
    return result

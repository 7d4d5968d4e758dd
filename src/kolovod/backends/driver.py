"""The thread that drives an engine of somebody else.

The trip of a bucket: the native engine decides it [1]; the driver copies its tensors out [2], for a
reduction scaled and in a dtype that every engine can add; the Backend carries the copies [3]; the
driver puts the results where they belong [4].
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kolovod import _native
from kolovod.backends.arithmetic import STORED, Reduction
from kolovod.backends.base import Array, Backend
from kolovod.core.ops import Op
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER

_BYTE = np.dtype(np.uint8)
_JOIN_S = 5.0

Bucket = dict[str, Any]  # see Engine.next_bucket
Piece = tuple[int, int, int]  # input address, output address, elements


class BucketThread(abc.ABC):
    """A thread that takes buckets from an external engine, and carries one after the other."""

    def __init__(self, engine: _native.Engine, name: str) -> None:
        """``engine`` was made with ``external=True``; ``name``: of the thread."""
        self._engine = engine
        self._stopping = threading.Event()
        # A daemon: a call into a foreign engine whose peer died may never return.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Carry every bucket from now on."""
        self._engine.hand_over()
        self._thread.start()

    def stop(self) -> None:
        """End after the bucket at hand; call it after ``engine.shutdown()``."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                bucket = self._engine.next_bucket(0.5)  # [1]
                if bucket is not None:
                    self._engine.bucket_done(bucket["token"], self._carry(bucket))
        except _native.EngineError:
            return  # shut down, or the world was aborted
        finally:
            self._end()

    @abc.abstractmethod
    def _carry(self, bucket: Bucket) -> str:
        """Do one bucket; returns why it failed, or nothing."""

    @abc.abstractmethod
    def _end(self) -> None:
        """The last thing that the thread does."""


class ExternalDriver(BucketThread):
    """Takes buckets from ``engine`` and lets ``backend`` carry them."""

    def __init__(self, engine: _native.Engine, backend: Backend, rank: int, size: int) -> None:
        """``engine`` was made with ``external=True`` for ``rank`` of ``size``."""
        super().__init__(engine, "kolovod-backend")
        self._backend = backend
        self._rank = rank
        self._size = size
        self._verbs: dict[int, Callable[[Bucket], None]] = {
            ALLREDUCE.number: self._allreduce,
            BROADCAST.number: self._broadcast,
            ALLGATHER.number: self._allgather,
            ALLTOALL.number: self._alltoall,
            REDUCESCATTER.number: self._reducescatter,
        }

    def _end(self) -> None:
        """Close also what a peer waits for that is still in a call: it sees the connection end."""
        self._backend.close()

    def _carry(self, bucket: Bucket) -> str:
        try:
            self._verbs[bucket["verb"]](bucket)
        except _native.EngineError:
            raise  # given up while it was on its way
        except Exception as error:  # of a library that we do not know
            return f"{type(error).__name__}: {error}"
        return ""

    # The verbs ----------------------------------------------------------------------------------

    def _allreduce(self, bucket: Bucket) -> None:
        reduction, values = self._reduction(bucket)
        self._backend.allreduce(values, reduction.carried_op)  # [3]
        self._write(bucket, reduction.finished(values))

    def _reducescatter(self, bucket: Bucket) -> None:
        reduction, values = self._reduction(bucket)
        counts: list[int] = bucket["sizes"]
        part = self._backend.reducescatter(values, reduction.carried_op, counts)
        ((source, target, _),) = bucket["tensors"]
        bucket["tensors"] = [(source, target, counts[self._rank])]
        self._write(bucket, reduction.finished(part))

    def _broadcast(self, bucket: Bucket) -> None:
        item_size = STORED[bucket["dtype"]].itemsize
        for source, target, count in bucket["tensors"]:
            values = self._read_bytes(bucket, source, count * item_size)
            if values.size > 0:
                self._backend.broadcast(values, bucket["root"])
            self._write_bytes(bucket, target, values)

    def _allgather(self, bucket: Bucket) -> None:
        sizes: list[int] = bucket["sizes"]
        ((source, target, _),) = bucket["tensors"]
        if any(sizes):
            values = self._read_bytes(bucket, source, sizes[self._rank])
            self._write_bytes(bucket, target, self._backend.allgather(values, sizes))

    def _alltoall(self, bucket: Bucket) -> None:
        sent: list[int] = bucket["sizes"]
        ((source, target, _),) = bucket["tensors"]
        if bucket["total"]:
            values = self._read_bytes(bucket, source, sum(sent))
            result = self._backend.alltoall(values, sent, bucket["received"], bucket["total"])
            self._write_bytes(bucket, target, result)

    # The memory of the tensors ------------------------------------------------------------------

    def _reduction(self, bucket: Bucket) -> tuple[Reduction, Array]:
        """[2] What is to be done, and on what."""
        reduction = Reduction(
            bucket["dtype"],
            Op(bucket["op"]),
            bucket["prescale"],
            bucket["postscale"],
            self._size,
        )
        pieces: Sequence[Piece] = bucket["tensors"]
        dtype = STORED[reduction.dtype]
        with self._memory(bucket):
            values = np.concatenate([_array(source, count, dtype) for source, _, count in pieces])
        return reduction, reduction.prepared(values)

    def _write(self, bucket: Bucket, values: Array) -> None:
        """[4] Cut the results and put them in their places."""
        start = 0
        with self._memory(bucket):
            for _, target, count in bucket["tensors"]:
                _array(target, count, values.dtype)[...] = values[start : start + count]
                start += count

    def _read_bytes(self, bucket: Bucket, source: int, count: int) -> Array:
        with self._memory(bucket):
            return _array(source, count, _BYTE).copy()

    def _write_bytes(self, bucket: Bucket, target: int, values: Array) -> None:
        with self._memory(bucket):
            _array(target, values.size, _BYTE)[...] = values

    @contextlib.contextmanager
    def _memory(self, bucket: Bucket) -> Iterator[None]:
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

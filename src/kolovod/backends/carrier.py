"""The thread that lets an engine of somebody else carry what is to be carried.

The trip of a bucket: the native engine decides it [1]; the carrier copies its tensors out, for a
reduction scaled and in a dtype that every engine can add [2]; the Backend carries the copies [3];
the carrier puts the results where they belong [4]. Where tensors are, on a GPU or not, only the
backend's Memory knows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from kolovod import _native
from kolovod.backends.base import Backend, Bucket, Flat, Reduction
from kolovod.core.ops import Op
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER

_BYTE = _native.DTYPES["uint8"]
_ITEM_BYTES = {traits["number"]: traits["bytes"] for traits in _native.DTYPE_TRAITS.values()}
_SHUT_DOWN = _native.STATUS["shut_down"]
_JOIN_S = 5.0

Pieces = Sequence[tuple[int, int]]
"""Address and number of elements."""


class Carrier:
    """Takes buckets from ``engine`` and lets ``backend`` carry one after the other."""

    def __init__(self, engine: _native.Engine, backend: Backend, rank: int, size: int) -> None:
        """``engine`` was made for ``rank`` of ``size``, external for the backend's memory."""
        self._engine = engine
        self._backend = backend
        self._memory = backend.memory
        self._rank = rank
        self._size = size
        self._stopping = threading.Event()
        # A daemon: a call into a foreign engine whose peer died may never return.
        self._thread = threading.Thread(target=self._serve, name="kolovod-backend", daemon=True)
        self._verbs: dict[int, Callable[[Bucket], None]] = {
            ALLREDUCE.number: self._allreduce,
            BROADCAST.number: self._broadcast,
            ALLGATHER.number: self._allgather,
            ALLTOALL.number: self._alltoall,
            REDUCESCATTER.number: self._reducescatter,
        }

    def start(self) -> None:
        """Carry every bucket from now on."""
        self._engine.hand_over()
        self._thread.start()

    def stop(self) -> None:
        """End after the bucket at hand; call it after ``engine.shutdown()``."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        is_healthy, bucket = False, None
        try:
            while not self._stopping.is_set():
                bucket = self._engine.next_bucket(0.5)  # [1]
                if bucket is not None:
                    self._engine.bucket_done(bucket["token"], self._carry(bucket))
                    bucket = None
            is_healthy = True
        except _native.EngineError as error:  # shut down, or the world was aborted
            is_healthy = bucket is None and error.args[0] == _SHUT_DOWN
        finally:
            # Also what a peer waits for that is still in a call: it sees the connection end.
            self._backend.close(is_healthy=is_healthy)

    def _carry(self, bucket: Bucket) -> str:
        """Do one bucket; return why it failed, or ""."""
        try:
            with self._memory.work(bucket):
                self._verbs[bucket["verb"]](bucket)
        except _native.EngineError:
            raise  # given up while it was on its way
        except Exception as error:  # of a library that we do not know
            return f"{type(error).__name__}: {error}"
        return ""

    # The verbs ----------------------------------------------------------------------------------

    def _allreduce(self, bucket: Bucket) -> None:
        pieces = bucket["tensors"]
        values = self._read(bucket, [(source, count) for source, _, count in pieces])
        reduction = self._reduction(bucket)
        values = reduction.prepared(values)
        self._backend.allreduce(values, reduction.carried_op)  # [3]
        values = reduction.finished(values)
        self._write(bucket, [(target, count) for _, target, count in pieces], values)

    def _reducescatter(self, bucket: Bucket) -> None:
        ((source, target, count),) = bucket["tensors"]
        values = self._read(bucket, [(source, count)])
        reduction = self._reduction(bucket)
        values = reduction.prepared(values)
        part = self._backend.reducescatter(values, reduction.carried_op, bucket["sizes"])
        self._deliver(bucket, target, bucket["sizes"][self._rank], reduction.finished(part))

    def _broadcast(self, bucket: Bucket) -> None:
        ((source, target, count),) = bucket["tensors"]
        size = count * _ITEM_BYTES[bucket["dtype"]]
        if size:
            values = self._read(bucket, [(source, size)], _BYTE)
            self._backend.broadcast(values, bucket["root"])
            self._write(bucket, [(target, size)], values)

    def _allgather(self, bucket: Bucket) -> None:
        sizes: list[int] = bucket["sizes"]
        ((source, target, _),) = bucket["tensors"]
        if any(sizes):
            values = self._read(bucket, [(source, sizes[self._rank])], _BYTE)
            self._deliver(bucket, target, sum(sizes), self._backend.allgather(values, sizes))

    def _alltoall(self, bucket: Bucket) -> None:
        sent: list[int] = bucket["sizes"]
        received: list[int] = bucket["received"]
        ((source, target, _),) = bucket["tensors"]
        if bucket["total"]:
            values = self._read(bucket, [(source, sum(sent))], _BYTE)
            result = self._backend.alltoall(values, sent, received, bucket["total"])
            self._deliver(bucket, target, sum(received), result)

    def _reduction(self, bucket: Bucket) -> Reduction:
        op, factors = Op(bucket["op"]), (bucket["prescale"], bucket["postscale"])
        return self._memory.reduction(bucket["dtype"], op, *factors, self._size)

    # The memory of the tensors ------------------------------------------------------------------

    def _read(self, bucket: Bucket, pieces: Pieces, dtype: int = -1) -> Flat:
        """[2] Copies; of another ``dtype`` than the bucket's if that is given."""
        with self._open(bucket):
            return self._memory.read(pieces, bucket["dtype"] if dtype < 0 else dtype)

    def _write(self, bucket: Bucket, pieces: Pieces, values: Flat) -> None:
        """[4] Cut the results and put them in their places."""
        self._settle(bucket)
        with self._open(bucket):
            self._memory.write(pieces, values)

    def _deliver(self, bucket: Bucket, target: int, count: int, values: Flat) -> None:
        """[4] Deliver a result whose place the engine has made, or has left to the memory."""
        if not self._memory.makes_outputs:
            self._write(bucket, [(target, count)], values)
            return
        self._settle(bucket)
        self._engine.keep_output(target, values)

    def _settle(self, bucket: Bucket) -> None:
        def look() -> None:  # whether the world goes on
            with self._open(bucket):
                pass

        self._memory.settle(look)

    @contextlib.contextmanager
    def _open(self, bucket: Bucket) -> Iterator[None]:
        """Open the bucket's memory to be touched; never during a call into the other engine.

        Such a call may outlast the bucket: when a rank dies, the operation fails at once, and its
        tensors may be freed while the call still waits for the dead.
        """
        self._engine.open_bucket(bucket["token"])
        try:
            yield
        finally:
            self._engine.close_bucket()

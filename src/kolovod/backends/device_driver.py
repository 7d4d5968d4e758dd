"""The thread that lets NCCL carry what is on GPUs.

The trip of a bucket: the device's engine decides it [1], the same on all ranks; the driver copies
its tensors into memory of its own, after what the submitters' streams had before them [2]; NCCL
carries that [3]; the driver copies the results out, or keeps them for who asks [4].

The host sees each of these end before it goes on. So tensors are touched only while the bucket's
memory is open, however late the GPU is; whoever waited for the operation needs no event; and while
NCCL waits for a rank that is dead, this thread still looks whether the world has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.backends.driver import Bucket, BucketThread
from kolovod.core.ops import Op
from kolovod.core.verbs import VERBS
from kolovod.errors import InvalidArgumentError, MismatchError

_LOOK_S = 0.02  # how often to see, while NCCL is at work, whether the world has ended
_JOINED = (
    "a rank has joined before the ranks' GPUs were connected: with the backend nccl let every rank "
    "do an operation on its GPU before any of them joins"
)
_BYTE = _native.DTYPES["uint8"]

Tensor = Any  # PyTorch's; imported by those who make a DeviceGroup


class DeviceGroup(Protocol):
    """All ranks' GPUs, each rank's own stream on its own, and flat tensors there.

    The verbs enqueue, on that stream, what all ranks enqueue in the same order.
    """

    def tensor_at(self, address: int, dtype: int, count: int) -> Tensor:
        """The memory at ``address`` as a flat tensor."""
        ...

    def zeros(self, dtype: int, count: int) -> Tensor:
        """A new flat tensor."""
        ...

    def after(self, events: Sequence[Any]) -> AbstractContextManager[None]:
        """Work on the stream of this group, after ``events``."""
        ...

    def mark(self) -> Any:
        """An event where the stream of this group is now: ``query()``, ``synchronize()``."""
        ...

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """A new tensor: ``parts``, one after the other."""
        ...

    def allreduce(self, values: Tensor, reduction: Any) -> Tensor:
        """What ``reduction`` (dtype, op, factors) makes of ``values`` of all ranks."""
        ...

    def reducescatter(self, values: Tensor, reduction: Any, counts: Sequence[int]) -> Tensor:
        """The part of this rank in that; ``counts[r]``: elements of rank r's."""
        ...

    def broadcast(self, values: Tensor, root: int) -> None:
        """Overwrite ``values`` with those of rank ``root``."""
        ...

    def allgather(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's bytes in rank order."""
        ...

    def alltoall(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """What every rank has for this one. ``sent[d]``, ``received[s]``: bytes to d, from s."""
        ...

    def abort(self) -> None:
        """End what a rank that is lost keeps from ending; nothing is called after it."""
        ...


class Devices(Protocol):
    """The GPUs that a rank sees, of which its first operation chooses one."""

    def connect(self, index: int) -> DeviceGroup:
        """Collective: the group whose member here is GPU ``index``."""
        ...

    def mark(self, index: int) -> Any:
        """An event on the current stream of the calling thread."""
        ...

    def nothing(self, index: int) -> Tensor:
        """No bytes, on GPU ``index``."""
        ...

    def to_host(self, index: int, address: int, dtype: int, shape: tuple[int, ...]) -> Tensor:
        """A copy in host memory, there when this returns."""
        ...

    def to_device(self, index: int, host: Tensor, address: int, dtype: int) -> None:
        """Enqueue, on the current stream, the copy back."""
        ...


class DeviceDriver(BucketThread):
    """Takes buckets from ``engine`` and carries them over a DeviceGroup."""

    def __init__(self, engine: _native.Engine, devices: Devices, rank: int, size: int) -> None:
        """``engine`` was made with ``external=True`` for ``rank`` of ``size``."""
        super().__init__(engine, "kolovod-nccl")
        self._devices = devices
        self._rank, self._size = rank, size
        self._lock = threading.Lock()
        self._index: int | None = None
        self._events: list[Any] = []  # of the streams of those who have submitted
        self._addresses: Counter[int] = Counter()  # that they have submitted: the rest are zeros
        self._made: dict[int, Tensor] = {}  # by address of the ticket
        self._group: DeviceGroup | None = None
        verbs: dict[str, Callable[[DeviceGroup, Bucket], None]] = {
            "allreduce": self._allreduce,
            "broadcast": self._broadcast,
            "allgather": self._allgather,
            "alltoall": self._alltoall,
            "reducescatter": self._reducescatter,
        }
        self._verbs = {VERBS[name].number: verb for name, verb in verbs.items()}
        self.to_host, self.to_device = devices.to_host, devices.to_device

    @contextlib.contextmanager
    def expecting(self, index: int, addresses: Sequence[int]) -> Iterator[None]:
        """What is submitted within is on GPU ``index``, and comes from the current stream.

        If that fails, it is as if it had not begun. Raises InvalidArgumentError if this rank has
        used another GPU before.
        """
        with self._lock:
            before = self._index
            if before not in (None, index):
                raise InvalidArgumentError(
                    f"a tensor on cuda:{index}, but this rank has used cuda:{before} before: "
                    "with the backend nccl a rank has one GPU; call torch.cuda.set_device("
                    "kolovod.local_rank()) first"
                )
            event = self._devices.mark(index)
            self._index = index
            self._events.append(event)
            self._addresses.update(addresses)
        try:
            yield
        except BaseException:
            with self._lock:
                self._index = before
                self._events = [other for other in self._events if other is not event]
                self._forget(addresses)
            raise

    def _forget(self, addresses: Iterable[int]) -> None:
        """With the lock held."""
        self._addresses.subtract(addresses)
        self._addresses += Counter()  # drops those of which none is left

    def made(self, ticket: npt.NDArray[np.uint8]) -> Tensor:
        """The result that belongs to what the native engine has made for it."""
        with self._lock:
            if ticket.size:
                return self._made.pop(ticket.ctypes.data)
        assert self._index is not None
        return self._devices.nothing(self._index)

    def _end(self) -> None:
        """NCCL may wait for a rank that is gone."""
        if self._group is not None:
            self._group.abort()

    def _carry(self, bucket: Bucket) -> str:
        with self._lock:
            events, self._events = self._events, []
            index = self._index
        if index is None:
            return _JOINED
        try:
            if self._group is None:
                self._group = self._devices.connect(index)
            with self._group.after(events):
                self._verbs[bucket["verb"]](self._group, bucket)
        except _native.EngineError:
            raise  # given up while it was on its way
        except MismatchError as error:  # of the ranks' meeting, to which one does not come
            return f"{_JOINED} (the ranks met to connect them: {error})"
        except Exception as error:  # of CUDA, or NCCL
            return f"{type(error).__name__}: {error}"
        with self._lock:
            self._forget(address for tensor in bucket["tensors"] for address in tensor[:2])
        return ""

    # The verbs ----------------------------------------------------------------------------------

    def _allreduce(self, group: DeviceGroup, bucket: Bucket) -> None:
        values = self._read(group, bucket)
        result = group.allreduce(values, self._reduction(bucket))
        self._finish(group, bucket)
        self._write(group, bucket, result)

    def _reducescatter(self, group: DeviceGroup, bucket: Bucket) -> None:
        values = self._read(group, bucket)
        result = group.reducescatter(values, self._reduction(bucket), bucket["sizes"])
        self._finish(group, bucket)
        self._keep(bucket, result)

    def _broadcast(self, group: DeviceGroup, bucket: Bucket) -> None:
        if any(count for _, _, count in bucket["tensors"]):
            values = self._read(group, bucket)
            group.broadcast(values, bucket["root"])
            self._finish(group, bucket)
            self._write(group, bucket, values)

    def _allgather(self, group: DeviceGroup, bucket: Bucket) -> None:
        sizes: list[int] = bucket["sizes"]
        if any(sizes):
            values = self._read(group, bucket, sizes[self._rank])
            result = group.allgather(values, sizes)
            self._finish(group, bucket)
            self._keep(bucket, result)

    def _alltoall(self, group: DeviceGroup, bucket: Bucket) -> None:
        sent: list[int] = bucket["sizes"]
        if bucket["total"]:
            values = self._read(group, bucket, sum(sent))
            result = group.alltoall(values, sent, bucket["received"])
            self._finish(group, bucket)
            self._keep(bucket, result)

    def _reduction(self, bucket: Bucket) -> Any:
        from kolovod.backends.device_arithmetic import DeviceReduction

        return DeviceReduction(
            bucket["dtype"],
            Op(bucket["op"]),
            bucket["prescale"],
            bucket["postscale"],
            self._size,
        )

    # The memory of the tensors ------------------------------------------------------------------

    def _read(self, group: DeviceGroup, bucket: Bucket, count: int = -1) -> Tensor:
        """[2] ``count``: bytes of the one tensor, whose elements the bucket does not say."""
        dtype: int = bucket["dtype"]
        with self._memory(bucket):
            parts = []
            for source, _, elements in bucket["tensors"]:
                elements = count if count >= 0 else elements
                with self._lock:
                    is_ours = self._addresses[source] > 0
                if is_ours and elements:
                    parts.append(group.tensor_at(source, dtype, elements))
                else:  # from a rank that has joined, in host memory
                    parts.append(group.zeros(dtype, elements))
            values = group.joined(parts)
            group.mark().synchronize()
        return values

    def _finish(self, group: DeviceGroup, bucket: Bucket) -> None:
        """[3] Return when NCCL is done. Raises EngineError when the bucket was given up."""
        done = group.mark()
        looked = time.monotonic()
        while not done.query():
            time.sleep(20e-6)
            if time.monotonic() - looked > _LOOK_S:
                self._engine.open_bucket(bucket["token"])
                self._engine.close_bucket()
                looked = time.monotonic()

    def _write(self, group: DeviceGroup, bucket: Bucket, values: Tensor) -> None:
        """[4] Cut the results and put them in their places."""
        start = 0
        with self._memory(bucket):
            for _, target, count in bucket["tensors"]:
                with self._lock:
                    is_ours = self._addresses[target] > 0
                if is_ours and count:
                    part = values[start : start + count]
                    group.tensor_at(target, bucket["dtype"], count).copy_(part)
                start += count
            group.mark().synchronize()

    def _keep(self, bucket: Bucket, values: Tensor) -> None:
        """[4] The same for a result that the engine has made a ticket for."""
        ((_, ticket, _),) = bucket["tensors"]
        if values.numel():
            with self._lock:  # a ticket that nobody came with is void once its memory is used again
                self._made[ticket] = values

    @contextlib.contextmanager
    def _memory(self, bucket: Bucket) -> Iterator[None]:
        """While the tensors' memory is touched; see ExternalDriver._memory."""
        self._engine.open_bucket(bucket["token"])
        try:
            yield
        finally:
            self._engine.close_bucket()

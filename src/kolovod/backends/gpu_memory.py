"""Tensors on a GPU: flat PyTorch tensors, on a stream of their own.

A rank picks its GPU by its first tensor there, long after ``init``; the backend connects the ranks
then.

The host sees every step of a bucket end before it goes on. So tensors are touched only while the
bucket's memory is open, however late the GPU is; whoever waited for the operation needs no event;
and while the backend waits for a rank that is dead, the carrier still looks whether the world has
ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kolovod.backends.base import Bucket, Reduction
from kolovod.backends.gpu_arithmetic import GpuReduction
from kolovod.errors import MismatchError, SettingError
from kolovod.torch.device import cuda
from kolovod.torch.frontend import BY_CODE, code_of

_LOOK_S = 0.02  # how often to see, while the backend is at work, whether the world has ended
_JOINED = (
    "a rank has joined before the ranks' GPUs were connected: let every rank do an operation on "
    "its GPU before any of them joins"
)


class GpuMemory:
    """The memory of one GPU, which the first bucket names; see ``Memory``."""

    reduction: type[Reduction] = GpuReduction
    makes_outputs = True

    def __init__(self, connect: Callable[[int], None], failure: Callable[[], str] = str) -> None:
        """``connect(index)`` is called once, when the GPU is known.

        ``failure()``: why the backend's work will never be done; "" as far as it is known.
        """
        self._connect = connect
        self._failure = failure
        self._is_connected = False
        self.index = -1
        self.stream: Any = None

    @contextmanager
    def work(self, bucket: Bucket) -> Iterator[None]:
        """Implement ``Memory.work``: work on the stream, after what the submitters' streams had."""
        self.index = bucket["device"]
        if self.index < 0:
            raise SettingError(_JOINED)
        if not self._is_connected:
            try:
                self.open()
                self._connect(self.index)
            except MismatchError as error:  # of the ranks' meeting, to which one does not come
                raise SettingError(f"{_JOINED} (the ranks met to connect them: {error})") from None
            self._is_connected = True
        with self.on_stream([address for address, _, _ in bucket["tensors"]]):
            yield

    def open(self) -> None:
        """Make the stream."""
        self.stream = torch.cuda.Stream(self.index)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self, addresses: Sequence[int] = ()) -> Iterator[None]:
        """Make the stream current, after what the tensors at ``addresses`` wait for."""
        for address in addresses:
            for event in cuda.submitted(address):
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream), torch.no_grad():
            yield

    def mark(self) -> Any:
        """An event where the stream is now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def read(self, pieces: Sequence[tuple[int, int]], dtype: int) -> torch.Tensor:
        """Implement ``Memory.read``. No address stands for zeros: the rank has joined."""
        parts = [
            self.tensor_at(address, dtype, count) if address else self.zeros(dtype, count)
            for address, count in pieces
        ]
        values = torch.cat(parts)
        self.mark().synchronize()
        return values

    def write(self, pieces: Sequence[tuple[int, int]], values: torch.Tensor) -> None:
        """Implement ``Memory.write``."""
        start = 0
        for address, count in pieces:
            if address:
                part = values[start : start + count]
                self.tensor_at(address, code_of(values), count).copy_(part)
            start += count
        self.mark().synchronize()

    def settle(self, look: Callable[[], None]) -> None:
        """Implement ``Memory.settle``. Raises RuntimeError if the backend has failed."""
        done = self.mark()
        looked = time.monotonic()
        while not done.query():
            time.sleep(20e-6)
            if time.monotonic() - looked > _LOOK_S:
                look()
                if why := self._failure():
                    raise RuntimeError(why)
                looked = time.monotonic()

    def tensor_at(self, address: int, dtype: int, count: int) -> torch.Tensor:
        """The memory at ``address`` as a flat tensor."""
        kind = BY_CODE[dtype]
        if count == 0:
            return self.zeros(dtype, 0)
        memory = _Bytes(address, count * kind.itemsize)
        return torch.as_tensor(memory, device=f"cuda:{self.index}").view(kind)

    def zeros(self, dtype: int, count: int) -> torch.Tensor:
        """A new flat tensor of zeros."""
        return torch.zeros(count, dtype=BY_CODE[dtype], device=f"cuda:{self.index}")


class _Bytes:
    """Memory of a GPU, as CUDA's array interface describes it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

"""A GPU that is not there: which copies are waited for, and in which order, without one.

Every tensor counts as being on it, but those that Kolovod itself makes in host memory. A copy to
the host is made as late as is allowed: when somebody waits for an event behind it, or enqueues a
copy back on its stream. Until then the memory holds other values, so that whoever does not wait,
or waits for the wrong stream, gets wrong results.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import torch

from kolovod.torch import TorchFrontend
from kolovod.torch.device import Cuda

_lock = threading.RLock()


class FakeStream:
    """Work in the order in which it was enqueued; none of it is done before somebody waits."""

    def __init__(self):
        self._work = []
        self._done = 0

    def enqueue(self, work):
        with _lock:
            self._work.append(work)

    def end(self):
        return len(self._work)

    def run(self, end):
        with _lock:
            while self._done < end:
                self._done += 1
                work, self._work[self._done - 1] = self._work[self._done - 1], None
                work()


class FakeEvent:
    """A place in a stream."""

    def __init__(self, stream, reached):
        self._stream, self._end, self._reached = stream, stream.end(), reached

    def synchronize(self):
        self._reached()
        self._stream.run(self._end)

    def query(self):
        self.synchronize()
        return True


class FakeDevice(Cuda):
    """See the module's text. Each thread has a current stream of its own."""

    def __init__(self):
        super().__init__()
        self._thread = threading.local()
        self._side = FakeStream()
        self._hosts = {}  # by address, and kept, so that no address comes twice
        self._unread = set()  # addresses of host memory that a copy has not reached
        self.packed_beside = 0
        self.noted = []  # of memory made on another stream: what is used here
        self.reached = int  # called before an event that a thread sleeps for is over

    def is_on_device(self, tensor):
        if tensor.is_sparse:
            return True
        if not tensor.numel() and hasattr(tensor, "is_in_host_memory"):
            return False
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() not in self._hosts

    def in_host_memory(self, tensor):
        if tensor.numel():
            self._hosts[tensor.untyped_storage().data_ptr()] = tensor
        else:  # it has no address
            tensor.is_in_host_memory = True
        return tensor

    def pinned(self, count, dtype):
        memory = torch.empty(count, dtype=dtype)
        memory.view(torch.uint8).fill_(0x55)
        return self.in_host_memory(memory)

    def stream_of(self, tensor):
        if not hasattr(self._thread, "stream"):
            self._thread.stream = FakeStream()
        return self._thread.stream

    def used_here(self, tensor):
        self.noted.append(tensor.data_ptr())

    def mark(self, tensor, sleeps=False):
        return FakeEvent(self.stream_of(tensor), self.reached if sleeps else int)

    def pack(self, tensors, host):
        stream = self.stream_of(host)
        self.packed_beside += stream is self._side
        address = host.data_ptr()
        if host.numel():  # else there is no address
            self._unread.add(address)
        pack = super().pack

        def work():
            pack(tensors, host)
            self._unread.discard(address)

        stream.enqueue(work)

    def unpack(self, host, tensors):
        assert host.data_ptr() not in self._unread, "nobody has waited for the copy to the host"
        assert not host.numel() or not self.is_on_device(host)
        stream = self.stream_of(host)
        stream.run(stream.end())
        super().unpack(host, tensors)

    def spread(self, flat, tensors):
        assert self.is_on_device(flat)
        super().spread(flat, tensors)

    def follow(self, streams):
        current = self.stream_of(None)
        for stream in streams:
            if stream is not current:
                current.enqueue(partial(stream.run, stream.end()))
        current.run(current.end())  # for what comes next on it is done at once

    @contextmanager
    def on(self, stream):
        before, self._thread.stream = self.stream_of(None), stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextmanager
    def beside(self, tensor, streams):
        before = self.stream_of(tensor)
        for stream in streams:
            self._side.enqueue(partial(stream.run, stream.end()))
        self._thread.stream = self._side
        try:
            yield
        finally:
            self._thread.stream = before


class FakeFrontend(TorchFrontend):
    """The front end that takes these tensors."""

    def __init__(self, device=None, is_direct=bool):
        super().__init__(device or FakeDevice(), is_direct)

    def view(self, tensor):
        if isinstance(tensor, torch.Tensor) and self.device.is_on_device(tensor):
            return self._slow_view(tensor)
        return super().view(tensor)

    def from_bytes(self, data, dtype, shape, like=None):
        made = super().from_bytes(data, dtype, shape, like)
        return made if isinstance(data, torch.Tensor) else self.device.in_host_memory(made)

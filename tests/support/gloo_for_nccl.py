"""NCCL's backend where there is no GPU: Gloo carries it, and tensors of a fake device are in RAM.

All but the constructor, the streams and the addresses of NcclGroup is the real one. An event of
which nobody has waited for keeps its stream's work from being done.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from datetime import timedelta

import torch
from fake_device import FakeFrontend

from kolovod.backends import nccl
from kolovod.backends.setup import BackendSetup, make_store
from kolovod.core.ops import Op
from kolovod.core.world import current, has_nccl
from kolovod.torch import TorchCollectives
from kolovod.torch.frontend import BY_CODE


class Event:
    """What a stream still has to do before it is over."""

    def __init__(self, work=lambda: None):
        self.work = work

    def query(self):
        return True

    def synchronize(self):
        pass


class GlooGroup(nccl.NcclGroup):
    """See the module's text."""

    aborted = 0

    def __init__(self, meeting, index, rank, size):
        from torch.distributed import ProcessGroupGloo

        self._torch, self._dist = torch, torch.distributed
        self._index, self._rank, self._size = index, rank, size
        nccl._need_different(meeting, OverGloo.identity(rank), rank, size)
        ops = torch.distributed.ReduceOp
        self._ops = {Op.Sum: ops.SUM, Op.Min: ops.MIN, Op.Max: ops.MAX, Op.Product: ops.PRODUCT}
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = make_store(torch.distributed.Store, meeting)
        self._group = ProcessGroupGloo(store, rank, size, options)
        self._all_add(torch.zeros(1), Op.Sum)

    def tensor_at(self, address, dtype, count):
        return memory(address, dtype, count)

    def zeros(self, dtype, count):
        return torch.zeros(count, dtype=BY_CODE[dtype])

    @contextmanager
    def after(self, events):
        for event in events:
            event.work()
        with torch.no_grad():
            yield

    def mark(self):
        return Event()

    def abort(self):
        type(self).aborted += 1
        self._group = None


class OverGloo(nccl.CudaDevices):
    """One fake GPU for each rank."""

    late_work = None  # what the submitter's stream has not done yet
    identity = staticmethod(lambda rank: f"fake GPU {rank}")

    def connect(self, index):
        meeting = BackendSetup(self._objects)
        try:
            group = GlooGroup(meeting, index, self._rank, self._size)
        except Exception as error:
            meeting.fail(error)
            raise
        meeting.finish()
        return group

    def mark(self, index):
        work, OverGloo.late_work = OverGloo.late_work, None
        return Event(work) if work else Event()

    def nothing(self, index):
        return torch.empty(0, dtype=torch.uint8)

    def to_host(self, index, address, dtype, shape):
        return memory(address, dtype, torch.Size(shape).numel()).clone().view(shape)

    def to_device(self, index, host, address, dtype):
        memory(address, dtype, host.numel()).copy_(host.view(-1))


def memory(address, dtype, count):
    kind = BY_CODE[dtype]
    if not count:
        return torch.empty(0, dtype=kind)
    bytes_ = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(bytes_, dtype=torch.uint8).view(kind)


def instead_of_nccl():
    """Let this process's worlds use it. Returns the verbs on tensors of the fake device."""
    os.environ["KOLOVOD_BACKEND"] = "nccl"
    nccl._count_gpus = lambda: 64
    nccl.CudaDevices = OverGloo
    return TorchCollectives(FakeFrontend(is_direct=has_nccl), current)

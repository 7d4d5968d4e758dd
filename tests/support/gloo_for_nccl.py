"""NCCL's backend where there is no GPU: Gloo carries it, and tensors of a fake device are in RAM.

All but the group, the streams and the addresses of NcclBackend and GpuMemory is the real one. An
event of which nobody has waited for keeps its stream's work from being done.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager
from datetime import timedelta

import torch
from fake_device import FakeDevice, FakeFrontend

from kolovod.backends import gpu_memory, nccl
from kolovod.core.world import current, takes_gpus
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


class RamMemory(gpu_memory.GpuMemory):
    """See the module's text."""

    def open(self):
        pass

    @contextmanager
    def on_stream(self, addresses=()):
        for address in addresses:
            for event in gpu_memory.cuda.submitted(address):
                event.work()
        with torch.no_grad():
            yield

    def mark(self):
        return Event()

    def tensor_at(self, address, dtype, count):
        kind = BY_CODE[dtype]
        if not count:
            return torch.empty(0, dtype=kind)
        bytes_ = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
        return torch.frombuffer(bytes_, dtype=torch.uint8).view(kind)

    def zeros(self, dtype, count):
        return torch.zeros(count, dtype=BY_CODE[dtype])


class OverGloo(nccl.NcclBackend):
    """One fake GPU for each rank."""

    identity = staticmethod(lambda rank: f"fake GPU {rank}")
    aborted = 0
    ended = 0

    def _make_memory(self):
        return RamMemory(self._connect, self._failure)

    def _identity(self, index):
        return OverGloo.identity(self._rank_group.rank)

    def _make_group(self, index, store):
        """As NCCL does: rank 0 says where it is, and all meet there, beside ``store``."""
        from torch.distributed import ProcessGroupGloo, TCPStore

        if self._rank_group.rank == 0:
            meeting_point = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            store.set("0:cuda:0", str(meeting_point.port).encode())
        else:
            meeting_point = TCPStore("127.0.0.1", int(store.get("0:cuda:0")))
        options = ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=30)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = ProcessGroupGloo(
            meeting_point, self._rank_group.rank, self._rank_group.size, options
        )
        group.allreduce([torch.zeros(1)]).wait()
        return group

    def close(self, *, is_healthy):
        if self._group is not None:
            OverGloo.ended += is_healthy
            OverGloo.aborted += not is_healthy
        self._group = None


class Submitting(FakeDevice):
    """A device whose tensors the engine takes as they are."""

    def __init__(self):
        super().__init__()
        self.late_work = None  # what the submitter's stream has not done yet
        self._of_engine = {}

    def submit(self, tensor):
        work, self.late_work = self.late_work, None
        self._of_engine[tensor.data_ptr()] = [Event(work)] if work else []

    def submitted(self, address):
        return self._of_engine.get(address, ())

    def empty(self, index):
        return torch.empty(0, dtype=torch.uint8)


def instead_of_nccl():
    """Let this process's worlds use it. Returns the verbs on tensors of the fake device."""
    os.environ["KOLOVOD_BACKEND"] = "nccl"
    nccl._count_gpus = lambda: 64
    nccl.NcclBackend = OverGloo
    gpu_memory.cuda = device = Submitting()
    return TorchCollectives(FakeFrontend(device, takes_gpus), current)

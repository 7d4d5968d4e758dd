"""The rank's side of each peer: how it starts, and how its verbs are called from Python.

Runs in the rank processes. Every peer is used as its own documentation shows, on the same NumPy
memory, and imports what it needs only when it is made: the MPI environments hold no torch.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Call = Callable[[Any, Any], Any]
"""One blocking verb: (wrapped buffer, wrapped output) -> the result, or None when it is in the
buffer (allreduce: sum, and broadcast from rank 0: in place) or in the output."""
Many = Callable[[Sequence[Any]], Any]
"""Reduces all the buffers, and returns when all are done."""


class Peer(abc.ABC):
    """What a worker owes its measurements. ``front``: the kind of tensor that the call is given."""

    rank: int
    size: int
    wants_output = True
    """Whether its allgather, alltoall and reducescatter are given memory for the result."""

    def wrap(self, front: str, array: np.ndarray[Any, Any], dtype: str) -> Any:
        """Return the same memory as the peer's own kind of tensor; bfloat16 comes as uint16."""
        if front == "numpy":
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

    @abc.abstractmethod
    def call(self, front: str, verb: str) -> Call:
        """Return the blocking call to be timed."""

    def many(self, front: str, way: str) -> Many:
        """``calls``: a blocking call each; ``async``: start all, then wait; ``grouped``: one."""
        if way == "calls":
            call = self.call(front, "allreduce")
            return lambda tensors: [call(tensor, None) for tensor in tensors]
        raise ValueError(f"{type(self).__name__} knows no way {way!r}")

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the world."""


class Local(Peer):
    """No communication at all: every process keeps what it has."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def call(self, front: str, verb: str) -> Call:
        return lambda tensor, out: tensor

    def close(self) -> None:
        """Do nothing: there is no world to leave."""


class Kolovod(Peer):
    """Kolovod's NumPy verbs (``numpy``) and torch verbs (``torch``) over one world."""

    wants_output = False

    def __init__(self) -> None:
        import kolovod

        kolovod.init()
        self._kolovod = kolovod
        self.rank, self.size = kolovod.rank(), kolovod.size()

    def _verbs(self, front: str) -> Any:
        if front == "numpy":
            return self._kolovod
        import kolovod.torch

        return kolovod.torch

    def call(self, front: str, verb: str) -> Call:
        verbs, total = self._verbs(front), self._kolovod.Sum
        calls: dict[str, Call] = {
            "allreduce": lambda tensor, out: verbs.allreduce_(tensor, op=total),
            "broadcast": lambda tensor, out: verbs.broadcast_(tensor, 0),
            "allgather": lambda tensor, out: verbs.allgather(tensor),
            "alltoall": lambda tensor, out: verbs.alltoall(tensor)[0],
            "reducescatter": lambda tensor, out: verbs.reducescatter(tensor, op=total),
        }
        return calls[verb]

    def many(self, front: str, way: str) -> Many:
        verbs, total = self._verbs(front), self._kolovod.Sum

        def start_then_wait(tensors: Sequence[Any]) -> None:
            handles = [
                verbs.allreduce_async_(tensor, name=f"bench.{index}", op=total)
                for index, tensor in enumerate(tensors)
            ]
            for handle in handles:
                handle.wait()

        if way == "async":
            return start_then_wait
        if way == "grouped":
            return lambda tensors: verbs.grouped_allreduce_(tensors, name="bench.group", op=total)
        return super().many(front, way)

    def close(self) -> None:
        self._kolovod.shutdown()


class Gloo(Peer):
    """torch.distributed's gloo backend on torch tensors."""

    backend = "gloo"

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        dist.init_process_group(self.backend, init_method=f"file://{os.environ['BENCH_GLOO_FILE']}",
                                rank=int(os.environ["RANK"]),
                                world_size=int(os.environ["WORLD_SIZE"]))  # fmt: skip
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def call(self, front: str, verb: str) -> Call:
        dist = self._dist
        calls: dict[str, Call] = {
            "allreduce": lambda tensor, out: dist.all_reduce(tensor),
            "broadcast": lambda tensor, out: dist.broadcast(tensor, 0),
            "allgather": lambda tensor, out: dist.all_gather_into_tensor(out, tensor),
            "alltoall": lambda tensor, out: dist.all_to_all_single(out, tensor),
            "reducescatter": lambda tensor, out: dist.reduce_scatter_tensor(out, tensor),
        }
        return calls[verb]

    def many(self, front: str, way: str) -> Many:
        def start_then_wait(tensors: Sequence[Any]) -> None:
            works = [self._dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()

        return start_then_wait if way == "async" else super().many(front, way)

    def close(self) -> None:
        self._dist.destroy_process_group()


class KolovodUnderTorch(Gloo):
    """Kolovod as torch.distributed's backend, in gloo's place."""

    backend = "kolovod"

    def __init__(self) -> None:
        import kolovod.torch  # noqa: F401 - registers the backend

        super().__init__()


class Mpi(Peer):
    """mpi4py on NumPy arrays; which MPI it is depends on the environment that runs this.

    The thread level is mpi4py's default, multiple. MPI4PY_RC_THREAD_LEVEL=single chooses the other:
    MPICH then spins, and was seen a hundred times slower where ranks outnumber cores.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def call(self, front: str, verb: str) -> Call:
        comm, in_place, total = self._comm, self._mpi.IN_PLACE, self._mpi.SUM
        calls: dict[str, Call] = {
            "allreduce": lambda array, out: comm.Allreduce(in_place, array, op=total),
            "broadcast": lambda array, out: comm.Bcast(array, root=0),
            "allgather": lambda array, out: comm.Allgather(array, out),
            "alltoall": lambda array, out: comm.Alltoall(array, out),
            "reducescatter": lambda array, out: comm.Reduce_scatter_block(array, out, op=total),
        }
        return calls[verb]

    def close(self) -> None:
        self._mpi.Finalize()


PEERS: dict[str, Callable[[], Peer]] = {
    "local": Local,
    "kolovod": Kolovod,
    "kolovod-tcp": Kolovod,
    "kolovod-unwatched": Kolovod,
    "gloo": Gloo,
    "kolovod-under-torch": KolovodUnderTorch,
    "openmpi": Mpi,
    "mpich": Mpi,
}

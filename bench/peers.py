"""The rank's side of each peer: how it starts, and how its allreduce is called from Python.

Runs in the rank processes. Every peer is used as its own documentation shows, in place on the same
NumPy memory, and imports what it needs only when it is made: the MPI environments hold no torch.
"""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Call = Callable[[Any], Any]
"""One blocking allreduce (sum, in place) of one wrapped buffer."""
Many = Callable[[Sequence[Any]], Any]
"""Reduces all the buffers, and returns when all are done."""


class Peer(abc.ABC):
    """What a worker owes its measurements. ``front``: the kind of tensor that the call is given."""

    rank: int
    size: int

    @abc.abstractmethod
    def wrap(self, front: str, array: np.ndarray[Any, Any]) -> Any:
        """The same memory as the peer's own kind of tensor."""

    @abc.abstractmethod
    def allreduce(self, front: str) -> Call:
        """The blocking call to be timed."""

    def many(self, front: str, way: str) -> Many:
        """``calls``: a blocking call each; ``async``: start all, then wait; ``grouped``: one."""
        if way == "calls":
            call = self.allreduce(front)
            return lambda tensors: [call(tensor) for tensor in tensors]
        raise ValueError(f"{type(self).__name__} knows no way {way!r}")

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the world."""


class Local(Peer):
    """No communication at all: every process keeps what it has."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def wrap(self, front: str, array: np.ndarray[Any, Any]) -> Any:
        return array

    def allreduce(self, front: str) -> Call:
        return lambda tensor: tensor

    def close(self) -> None:
        """There is no world to leave."""


class Kolovod(Peer):
    """Kolovod's NumPy verbs (``numpy``) and torch verbs (``torch``) over one world."""

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

    def wrap(self, front: str, array: np.ndarray[Any, Any]) -> Any:
        if front == "numpy":
            return array
        import torch

        return torch.from_numpy(array)

    def allreduce(self, front: str) -> Call:
        return functools.partial(self._verbs(front).allreduce_, op=self._kolovod.Sum)

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

    def wrap(self, front: str, array: np.ndarray[Any, Any]) -> Any:
        import torch

        return torch.from_numpy(array)

    def allreduce(self, front: str) -> Call:
        return self._dist.all_reduce

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

    def wrap(self, front: str, array: np.ndarray[Any, Any]) -> Any:
        return array

    def allreduce(self, front: str) -> Call:
        reduce, in_place, total = self._comm.Allreduce, self._mpi.IN_PLACE, self._mpi.SUM
        return lambda array: reduce(in_place, array, op=total)

    def close(self) -> None:
        self._mpi.Finalize()


PEERS: dict[str, Callable[[], Peer]] = {
    "local": Local,
    "kolovod": Kolovod,
    "gloo": Gloo,
    "kolovod-under-torch": KolovodUnderTorch,
    "openmpi": Mpi,
    "mpich": Mpi,
}

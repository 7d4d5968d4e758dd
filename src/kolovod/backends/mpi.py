"""MPI under our negotiation: ``kolovod run --backend mpi``, or KOLOVOD_BACKEND=mpi under mpirun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kolovod.backends.base import Array, Bytes
from kolovod.backends.host_memory import HostMemory
from kolovod.core.ops import Op
from kolovod.errors import SettingError

if TYPE_CHECKING:
    from kolovod.backends.setup import BackendSetup, RankGroup

_MAX_COUNT = 1 << 30  # MPI 3 counts elements in an int; what is larger goes in parts


class MpiBackend:
    """Collectives of MPI among the world's ranks, through mpi4py.

    The order of additions is the MPI library's choice: it may depend on the size of a tensor, and
    on what it was fused with.
    """

    def __init__(self, rank_group: RankGroup, meeting: BackendSetup | None = None) -> None:
        """Collective: makes a communicator of its own, ordered like the world's ranks.

        ``meeting`` is not needed: MPI's processes know each other. Raises InvalidArgumentError when
        mpi4py is not installed, when MPI did not start exactly the job's processes, or when it
        cannot be called from a second thread.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library was found
            raise SettingError(
                f"backend 'mpi' needs mpi4py and an MPI library ({error}): "
                "pip install 'kolovod[mpi]'"
            ) from None
        world = rank_group.world
        mpi_size, size = MPI.COMM_WORLD.Get_size(), world.environment.size
        if mpi_size != size:
            raise SettingError(
                f"backend 'mpi': MPI has {mpi_size} process(es), the world {size} rank(s); "
                f"start it with 'kolovod run -np {size} --backend mpi', or with mpirun"
            )
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise SettingError(
                "backend 'mpi' calls MPI from a thread of its own; initialise MPI with "
                "THREAD_SERIALIZED or more (mpi4py asks for THREAD_MULTIPLE unless told otherwise)"
            )
        self.memory = HostMemory()
        self._rank = rank_group.rank
        members = MPI.COMM_WORLD.Get_group().Incl(world.members)  # MPI was the launcher
        self._communicator = MPI.COMM_WORLD.Create_group(members)
        self._in_place = MPI.IN_PLACE
        self._ops = {Op.Sum: MPI.SUM, Op.Min: MPI.MIN, Op.Max: MPI.MAX, Op.Product: MPI.PROD}
        self._byte = MPI.BYTE
        self._wait_all = MPI.Request.Waitall

    def allreduce(self, values: Array, op: Op) -> None:
        """Implement ``Backend.allreduce``."""
        for part in _chunks(values):
            self._communicator.Allreduce(self._in_place, part, self._ops[op])

    def broadcast(self, values: Bytes, root: int) -> None:
        """Implement ``Backend.broadcast``."""
        for part in _chunks(values):
            self._communicator.Bcast([part, self._byte], root)

    def allgather(self, values: Bytes, sizes: Sequence[int]) -> Bytes:
        """Implement ``Backend.allgather``."""
        result = np.empty(sum(sizes), np.uint8)
        if result.size <= _MAX_COUNT:
            self._communicator.Allgatherv(
                [values, self._byte], [result, sizes, _starts(sizes), self._byte]
            )
            return result
        parts = _parts(result, sizes)
        parts[self._rank][...] = values
        for rank, part in enumerate(parts):
            self.broadcast(part, rank)
        return result

    def alltoall(
        self, values: Bytes, sent: Sequence[int], received: Sequence[int], total: int
    ) -> Bytes:
        """Implement ``Backend.alltoall``."""
        result = np.empty(sum(received), np.uint8)
        # The same answer on every rank, whatever its own share.
        if total <= _MAX_COUNT:
            self._communicator.Alltoallv(
                [values, sent, _starts(sent), self._byte],
                [result, received, _starts(received), self._byte],
            )
            return result
        # Between two ranks messages keep their order, so the chunks need no further label.
        requests = [
            self._communicator.Irecv([chunk, self._byte], source)
            for source, part in enumerate(_parts(result, received))
            for chunk in _chunks(part)
        ]
        requests += [
            self._communicator.Isend([chunk, self._byte], to)
            for to, part in enumerate(_parts(values, sent))
            for chunk in _chunks(part)
        ]
        self._wait_all(requests)
        return result

    def reducescatter(self, values: Array, op: Op, counts: Sequence[int]) -> Array:
        """Implement ``Backend.reducescatter``."""
        if values.size <= _MAX_COUNT:
            result = np.empty(counts[self._rank], values.dtype)
            self._communicator.Reduce_scatter(values, result, counts, self._ops[op])
            return result
        parts = _parts(values, counts)
        for root, part in enumerate(parts):
            for chunk in _chunks(part):
                source, target = (self._in_place, chunk) if root == self._rank else (chunk, None)
                self._communicator.Reduce(source, target, self._ops[op], root)
        return parts[self._rank]

    def close(self, *, is_healthy: bool) -> None:
        """Keep the communicator: to free it would be collective, and the others may be dead."""


def _chunks(values: Array) -> Iterator[Array]:
    return (values[start : start + _MAX_COUNT] for start in range(0, values.size, _MAX_COUNT))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _parts(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Views: ``values`` cut into parts of these sizes."""
    return [values[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=True)]

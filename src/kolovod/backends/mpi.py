"""MPI under our negotiation: ``kolovod run --backend mpi``, or KOLOVOD_BACKEND=mpi under mpirun."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kolovod.errors import InvalidArgumentError
from kolovod.ops import Op

_MAX_COUNT = 1 << 30  # MPI 3 counts elements in an int


class MpiBackend:
    """Collectives of MPI's COMM_WORLD, through mpi4py."""

    def __init__(self, world_rank: int, world_size: int) -> None:
        """Collective: makes a communicator of its own, ordered like the world's ranks.

        Raises InvalidArgumentError when mpi4py is not installed, when MPI did not start exactly the
        world's processes, or when it cannot be called from a second thread.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library was found
            raise InvalidArgumentError(
                f"backend 'mpi' needs mpi4py and an MPI library ({error}): "
                "pip install 'kolovod[mpi]'"
            ) from None
        mpi_size = MPI.COMM_WORLD.Get_size()
        if mpi_size != world_size:
            raise InvalidArgumentError(
                f"backend 'mpi': MPI has {mpi_size} process(es), the world {world_size} rank(s); "
                f"start it with 'kolovod run -np {world_size} --backend mpi', or with mpirun"
            )
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise InvalidArgumentError(
                "backend 'mpi' calls MPI from a thread of its own; initialise MPI with "
                "THREAD_SERIALIZED or more (mpi4py asks for THREAD_MULTIPLE unless told otherwise)"
            )
        self._communicator = MPI.COMM_WORLD.Split(0, world_rank)
        self._in_place = MPI.IN_PLACE
        self._ops = {Op.Sum: MPI.SUM, Op.Min: MPI.MIN, Op.Max: MPI.MAX, Op.Product: MPI.PROD}
        self._byte = MPI.BYTE

    def allreduce(self, values: npt.NDArray[Any], op: Op) -> None:
        """See Backend.allreduce."""
        for start in range(0, values.size, _MAX_COUNT):
            part = values[start : start + _MAX_COUNT]
            self._communicator.Allreduce(self._in_place, part, self._ops[op])

    def broadcast(self, values: npt.NDArray[np.uint8], root: int) -> None:
        """See Backend.broadcast."""
        for start in range(0, values.size, _MAX_COUNT):
            part = values[start : start + _MAX_COUNT]
            self._communicator.Bcast([part, self._byte], root)

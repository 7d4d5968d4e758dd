"""The functions that every front end of Horovod exports beside its verbs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import kolovod
from horovod.common import membership
from horovod.common.process_sets import ProcessSet
from horovod.common.uninitialized import through_horovod
from kolovod.core.engine_factory import listed
from kolovod.core.world import current
from kolovod.errors import MismatchError
from kolovod.rendezvous.external.mpi import ranks_of

Average = int(kolovod.Average)
Sum = int(kolovod.Sum)
Adasum = int(kolovod.Adasum)
Min = int(kolovod.Min)
Max = int(kolovod.Max)
Product = int(kolovod.Product)

shutdown = kolovod.shutdown
is_initialized = kolovod.is_initialized
rank = through_horovod(kolovod.rank)
size = through_horovod(kolovod.size)
local_rank = through_horovod(kolovod.local_rank)
local_size = through_horovod(kolovod.local_size)
cross_rank = through_horovod(kolovod.cross_rank)
cross_size = through_horovod(kolovod.cross_size)
start_timeline = through_horovod(kolovod.start_timeline)
stop_timeline = through_horovod(kolovod.stop_timeline)


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Form a world with the other ranks; does nothing in one.

    ``comm``: None (or nothing in it) for all ranks, an iterable of launcher ranks, or an mpi4py
    communicator. ``process_sets``: sets to register at once, the same on all ranks, or "dynamic",
    which is always possible here. Raises ValueError for others, and for sets that are not the same
    on all ranks; NotImplementedError for ranks with a set made of a communicator.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets={process_sets!r}: expected a list, or 'dynamic'")
        process_sets = None
    sets = list(process_sets or ())
    by_comm = [ps for ps in sets if getattr(ps, "mpi_comm", None) is not None]
    if isinstance(comm, Iterable):
        comm = listed(comm)
        if comm and by_comm:
            raise NotImplementedError(
                f"{by_comm[0]} is made of a communicator, but comm is the list {comm}: give a "
                "communicator or ranks for both"
            )
    elif comm is not None:
        members = ranks_of(comm)
        for process_set in by_comm:
            process_set.renumber(members)
    with membership.entering():
        try:
            kolovod.init(comm or None, sets)  # also an empty list: Horovod compares the ranks' sets
        except MismatchError as error:
            raise ValueError(str(error)) from None


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks. Raises ValueError before ``init``."""
    hosts = current().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI. Raises ValueError if MPI is not used."""
    if not mpi_enabled():
        raise ValueError(
            "this world does not use MPI: start it with horovodrun --mpi, or KOLOVOD_BACKEND=mpi"
        )
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI carries this world's data."""
    return current().settings.backend == "mpi"


def gloo_enabled() -> bool:
    """Return whether this world needs no MPI. Kolovod's own engine stands in for Gloo."""
    return not mpi_enabled()


def mpi_built(verbose: bool = False) -> bool:
    """Return whether mpi4py is there; nothing is compiled against MPI."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built(verbose: bool = False) -> bool:
    """True: what Gloo is to Horovod, Kolovod's own engine is here."""
    return True


def nccl_built(verbose: bool = False) -> int:
    """The version of the NCCL that comes with PyTorch, 22703 for 2.27.3; 0 without it."""
    if not cuda_built():
        return 0
    import torch

    if not torch.distributed.is_nccl_available():
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return nccl_code(major, minor, patch)


def nccl_code(major: int, minor: int, patch: int) -> int:
    """The number that NCCL gives a version, which scripts compare with: otherwise before 2.9."""
    if (major, minor) < (2, 9):
        return major * 1000 + minor * 100 + patch
    return major * 10000 + minor * 100 + patch


def ddl_built(verbose: bool = False) -> bool:
    """False: IBM's DDL is not supported."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: oneCCL is not supported."""
    return False


def cuda_built() -> bool:
    """Return whether PyTorch is installed, and for CUDA: then tensors on GPUs can be sent."""
    try:
        import torch
    except ImportError:
        return False
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """False: nothing is compiled against ROCm."""
    return False

"""Horovod's interface for Keras: ``import horovod.keras as hvd``."""

from __future__ import annotations

from typing import Any

from horovod import NO_ELASTIC
from horovod.common.basics import (
    Adasum,
    Average,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from horovod.keras import callbacks
from horovod.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from horovod.keras.values import (
    allgather,
    broadcast,
    broadcast_global_variables,
    reduced,
    reducescatter,
)
from kolovod.keras import Compression

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer",
    "ProcessSet", "Sum", "add_process_set", "allgather", "allreduce", "broadcast",
    "broadcast_global_variables", "callbacks", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "init",
    "is_homogeneous", "is_initialized", "load_model", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "reducescatter",
    "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = True,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine ``value`` over all ranks; a tensor.

    Horovod's default of ``average`` makes an error of ``op`` alone: give ``average=None`` with it.
    """
    if op is None and average is True:
        average = None  # it is the default, not a deprecated word of the caller
    return reduced(value, name, average, prescale_factor, postscale_factor, op, compression)


def __getattr__(name: str) -> object:
    """Say of what is still missing that it is, not merely unknown."""
    if name == "elastic":
        raise AttributeError(NO_ELASTIC)
    raise AttributeError(f"module 'horovod.keras' has no attribute {name!r}")

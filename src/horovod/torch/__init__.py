"""Horovod's PyTorch interface: ``import horovod.torch as hvd``."""

from __future__ import annotations

import horovod as _horovod  # says so if the real one is installed, too
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("torch"):
    raise _error

from horovod.common.exceptions import HorovodInternalError
from horovod.torch import elastic
from horovod.torch import mpi_ops as _mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import *
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__version__ = _horovod.__version__


_MPI_LIB_AVAILABLE = True

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += _mpi_ops.__all__

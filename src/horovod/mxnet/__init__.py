"""Horovod's MXNet interface: ``import horovod.mxnet as hvd``."""

from __future__ import annotations

import horovod as _horovod  # says so if the real one is installed, too
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("mxnet"):
    raise _error

from horovod.common.exceptions import HorovodInternalError
from horovod.mxnet import mpi_ops as _mpi_ops
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from horovod.mxnet.mpi_ops import *
from horovod.mxnet.optimizers import DistributedOptimizer, DistributedTrainer

__version__ = _horovod.__version__

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "HorovodInternalError",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
]
__all__ += _mpi_ops.__all__

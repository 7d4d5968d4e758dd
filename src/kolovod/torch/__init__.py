"""Kolovod on PyTorch tensors: the verbs, ``DistributedOptimizer``, and starting equal.

import kolovod.torch as kv

kv.init()
optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
kv.broadcast_parameters(model.state_dict())
kv.broadcast_optimizer_state(optimizer)
"""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("torch"):
    raise _error

from kolovod.c10d import register as _register
from kolovod.core.handles import Handle
from kolovod.core.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.core.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.core.rank_info import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.core.spans import span
from kolovod.core.transfers import Transfers
from kolovod.core.world import is_initialized
from kolovod.gradients.compression import Compression, Compressor
from kolovod.lifecycle import init, shutdown
from kolovod.metrics import Metrics as _Metrics
from kolovod.observe.timeline import start_timeline, stop_timeline
from kolovod.torch import backward_span as _backward_span  # noqa: F401  # registers itself
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import TorchFrontend
from kolovod.torch.functions import Functions
from kolovod.torch.optimizer import DistributedOptimizer
from kolovod.torch.sync_batch_norm import SyncBatchNorm
from kolovod.torch.verbs import collectives

_register()  # where torch has not done so itself, by the entry point in pyproject.toml
_functions = Functions(collectives)
_transfers = Transfers(collectives.frontend, collectives.world)
_metrics = _Metrics(collectives)

allreduce = collectives.allreduce
allreduce_async = collectives.allreduce_async
allreduce_ = collectives.allreduce_
allreduce_async_ = collectives.allreduce_async_
grouped_allreduce = collectives.grouped_allreduce
grouped_allreduce_async = collectives.grouped_allreduce_async
grouped_allreduce_ = collectives.grouped_allreduce_
grouped_allreduce_async_ = collectives.grouped_allreduce_async_
broadcast = collectives.broadcast
broadcast_async = collectives.broadcast_async
broadcast_ = collectives.broadcast_
broadcast_async_ = collectives.broadcast_async_
allgather = collectives.allgather
allgather_async = collectives.allgather_async
grouped_allgather = collectives.grouped_allgather
grouped_allgather_async = collectives.grouped_allgather_async
alltoall = collectives.alltoall
alltoall_async = collectives.alltoall_async
reducescatter = collectives.reducescatter
reducescatter_async = collectives.reducescatter_async
grouped_reducescatter = collectives.grouped_reducescatter
grouped_reducescatter_async = collectives.grouped_reducescatter_async
barrier = collectives.barrier
join = collectives.join
send = _transfers.send
recv = _transfers.recv
isend = _transfers.isend
irecv = _transfers.irecv
poll = collectives.poll
synchronize = collectives.synchronize
broadcast_parameters = _functions.broadcast_parameters
broadcast_optimizer_state = _functions.broadcast_optimizer_state
broadcast_object = _functions.broadcast_object
allgather_object = _functions.allgather_object
average_metrics = _metrics.average_metrics
gather_samples = _metrics.gather_samples

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "TorchCollectives",
    "TorchFrontend",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "collectives",
    "cross_rank",
    "cross_size",
    "gather_samples",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "irecv",
    "is_initialized",
    "isend",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "send",
    "shutdown",
    "size",
    "span",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

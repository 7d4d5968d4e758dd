"""Kolovod on MXNet's arrays: the verbs, ``DistributedTrainer``, and starting equal.

    import kolovod.mxnet as kv

    kv.init()
    kv.broadcast_parameters(net.collect_params())
    trainer = kv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1 * kv.size()})

For ``mx.nd.NDArray`` and ``mx.np.ndarray`` in host memory. MXNet 1.9.1, which needs NumPy 1.23 and
Python 3.11 or older; the extra ``kolovod[mxnet]`` brings both.
"""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("mxnet"):
    raise _error

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
from kolovod.core.world import is_initialized
from kolovod.gradients.compression import Compression, Compressor
from kolovod.lifecycle import init, shutdown
from kolovod.mxnet import store as _store
from kolovod.mxnet.frontend import MxnetFrontend
from kolovod.mxnet.functions import Functions
from kolovod.mxnet.optimizer import DistributedOptimizer
from kolovod.mxnet.store import Kolovod
from kolovod.mxnet.trainer import DistributedTrainer
from kolovod.mxnet.verbs import MxnetCollectives, collectives
from kolovod.observe.timeline import start_timeline, stop_timeline

_store.register()
_functions = Functions(collectives)

allreduce = collectives.allreduce
allreduce_ = collectives.allreduce_
allreduce_async = collectives.allreduce_async
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
poll = collectives.poll
synchronize = collectives.synchronize
broadcast_parameters = _functions.broadcast_parameters
broadcast_object = _functions.broadcast_object
allgather_object = _functions.allgather_object

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Handle",
    "Kolovod",
    "Max",
    "Min",
    "MxnetCollectives",
    "MxnetFrontend",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
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
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "collectives",
    "cross_rank",
    "cross_size",
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
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "span",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

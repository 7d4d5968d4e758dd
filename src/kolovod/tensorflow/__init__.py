"""Kolovod on TensorFlow's tensors, eager and inside ``tf.function``.

    import kolovod.tensorflow as kv

    kv.init()
    kv.broadcast_variables(model.variables)

    @tf.function
    def step(x, y):
        with kv.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)  # sent while backward runs
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

Host memory only. Importing this registers ops with the TensorFlow that is installed (2.15 or
later); Kolovod itself is built without it, and one build serves all versions.
"""

from __future__ import annotations

from typing import Any as _Any

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("tensorflow"):
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
from kolovod.observe.timeline import start_timeline, stop_timeline
from kolovod.tensorflow import graph
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.tensorflow.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from kolovod.tensorflow.optimizer import DistributedOptimizer
from kolovod.tensorflow.run_time import (
    cross_rank_op,
    cross_size_op,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from kolovod.tensorflow.tape import DistributedGradientTape
from kolovod.tensorflow.verbs import TensorflowCollectives, collectives

graph.register()

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


def __getattr__(name: str) -> _Any:
    """``SyncBatchNormalization``, for which Keras is imported when it is asked for."""
    if name == "SyncBatchNormalization":
        from kolovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module 'kolovod.tensorflow' has no attribute {name!r}")


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "TensorflowCollectives",
    "TensorflowFrontend",
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
    "broadcast_object_fn",
    "broadcast_variables",
    "collectives",
    "cross_rank",
    "cross_rank_op",
    "cross_size",
    "cross_size_op",
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
    "local_rank_op",
    "local_size",
    "local_size_op",
    "poll",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "size_op",
    "span",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

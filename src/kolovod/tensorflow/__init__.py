"""Kolovod on TensorFlow's tensors, eager and inside ``tf.function``.

    import kolovod.tensorflow as kv

    kv.init()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [kv.allreduce(gradient) for gradient in gradients]  # on their way together
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

Host memory only. Importing this registers an op with the TensorFlow that is installed (2.18 or
later); Kolovod itself is built without it, and one build serves all versions.
"""

from __future__ import annotations

from kolovod.facts import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.handles import Handle
from kolovod.numpy import allgather_object, broadcast_object
from kolovod.observe.spans import span
from kolovod.observe.timeline import start_timeline, stop_timeline
from kolovod.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.tensorflow import graph
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.tensorflow.verbs import TensorflowCollectives, collectives
from kolovod.world import init, is_initialized, shutdown

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

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
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

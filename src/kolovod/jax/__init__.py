"""Kolovod on JAX's arrays, eager and under ``jax.jit``.

    import kolovod.jax as kv

    kv.init()

    @jax.jit
    def step(params, batch):
        grads = jax.grad(loss_of)(params, batch)
        leaves, tree = jax.tree.flatten(grads)
        leaves = [kv.allreduce(g, name=f"grad.{i}") for i, g in enumerate(leaves)]
        return update(params, jax.tree.unflatten(tree, leaves))

Host memory only. JAX 0.5 or later; Kolovod itself is built without it. Arrays cannot be changed, so
there are no verbs in place.
"""

from __future__ import annotations

from kolovod.facts import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.handles import Handle
from kolovod.jax import graph
from kolovod.jax.frontend import JaxFrontend
from kolovod.jax.verbs import JaxCollectives, collectives
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
from kolovod.world import init, is_initialized, shutdown

graph.register()

allreduce = collectives.allreduce
allreduce_async = collectives.allreduce_async
grouped_allreduce = collectives.grouped_allreduce
grouped_allreduce_async = collectives.grouped_allreduce_async
broadcast = collectives.broadcast
broadcast_async = collectives.broadcast_async
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
    "JaxCollectives",
    "JaxFrontend",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "collectives",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
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

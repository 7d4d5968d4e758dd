"""Kolovod on JAX's arrays, eager and inside ``jax.jit``; gradients averaged for optax.

    import kolovod.jax as kv

    kv.init()
    optimizer = kv.DistributedOptimizer(optax.adam(1e-3))
    params = kv.broadcast_pytree(params)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, kv.allreduce(loss)

Host memory only. JAX 0.5 or later; Kolovod itself is built without it. Arrays cannot be changed, so
there are no verbs in place. docs/jax.md has more.
"""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("jax"):
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
from kolovod.jax import graph
from kolovod.jax.frontend import JaxFrontend
from kolovod.jax.optimizer import AccumulatedState, DistributedOptimizer, average_gradients
from kolovod.jax.pytrees import Pytrees
from kolovod.jax.verbs import JaxCollectives, collectives
from kolovod.lifecycle import init, shutdown
from kolovod.metrics import Metrics as _Metrics
from kolovod.numpy import allgather_object, broadcast_object
from kolovod.observe.timeline import start_timeline, stop_timeline

graph.register()
_pytrees = Pytrees(collectives)
_metrics = _Metrics(collectives)

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
allreduce_pytree = _pytrees.allreduce_pytree
broadcast_pytree = _pytrees.broadcast_pytree
average_metrics = _metrics.average_metrics
gather_samples = _metrics.gather_samples

__all__ = [
    "AccumulatedState",
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
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
    "allreduce_pytree",
    "alltoall",
    "alltoall_async",
    "average_gradients",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_pytree",
    "collectives",
    "cross_rank",
    "cross_size",
    "gather_samples",
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

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

from kolovod.gradients.compression import Compression, Compressor, Payload
from kolovod.jax import alike, graph, repeated, retracing
from kolovod.jax.clipping import clip_by_global_norm
from kolovod.jax.diloco import DiLoCoState, diloco
from kolovod.jax.elastic import share_in_elastic_jobs as _share_in_elastic_jobs
from kolovod.jax.frontend import JaxFrontend
from kolovod.jax.local_training import LocalTraining
from kolovod.jax.optimizer import AccumulatedState, DistributedOptimizer, average_gradients
from kolovod.jax.periodic import LocalSGDState, local_sgd
from kolovod.jax.pytrees import Pytrees
from kolovod.jax.sharded import ShardedState
from kolovod.jax.verbs import JaxCollectives, collectives
from kolovod.metrics import Metrics as _Metrics
from kolovod.surface import bind as _bind
from kolovod.surface.verbs import *
from kolovod.surface.world import *

alike.register()
graph.register()
repeated.register()
retracing.register()
_share_in_elastic_jobs()
_pytrees = Pytrees(collectives)
_metrics = _Metrics(collectives)

allreduce_pytree = _pytrees.allreduce_pytree
broadcast_pytree = _pytrees.broadcast_pytree
average_metrics = _metrics.average_metrics
gather_samples = _metrics.gather_samples

__all__ = [
    "AccumulatedState",
    "Compression",
    "Compressor",
    "DiLoCoState",
    "DistributedOptimizer",
    "JaxCollectives",
    "JaxFrontend",
    "LocalSGDState",
    "LocalTraining",
    "Payload",
    "ShardedState",
    "allreduce_pytree",
    "average_gradients",
    "average_metrics",
    "broadcast_pytree",
    "clip_by_global_norm",
    "collectives",
    "diloco",
    "gather_samples",
    "local_sgd",
]
__all__ += _bind(globals(), collectives, in_place=False)

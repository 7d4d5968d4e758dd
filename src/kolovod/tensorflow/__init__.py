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

from kolovod.gradients.compression import Compression, Compressor, Payload
from kolovod.surface import bind as _bind
from kolovod.surface.inplace import *
from kolovod.surface.verbs import *
from kolovod.surface.world import *
from kolovod.tensorflow import graph
from kolovod.tensorflow.elastic import share_in_elastic_jobs as _share_in_elastic_jobs
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.tensorflow.functions import (
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
_share_in_elastic_jobs()


def __getattr__(name: str) -> _Any:
    """``SyncBatchNormalization``, for which Keras is imported when it is asked for."""
    if name == "SyncBatchNormalization":
        from kolovod.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module 'kolovod.tensorflow' has no attribute {name!r}")


__all__ = [
    "Compression",
    "Compressor",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Payload",
    "SyncBatchNormalization",
    "TensorflowCollectives",
    "TensorflowFrontend",
    "broadcast_object_fn",
    "broadcast_variables",
    "collectives",
    "cross_rank_op",
    "cross_size_op",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += _bind(globals(), collectives)

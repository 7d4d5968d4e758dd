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

from kolovod.gradients.compression import Compression, Compressor, Payload
from kolovod.mxnet import store as _store
from kolovod.mxnet.elastic import share_in_elastic_jobs as _share_in_elastic_jobs
from kolovod.mxnet.frontend import MxnetFrontend
from kolovod.mxnet.functions import Functions
from kolovod.mxnet.optimizer import DistributedOptimizer
from kolovod.mxnet.store import Kolovod
from kolovod.mxnet.trainer import DistributedTrainer
from kolovod.mxnet.verbs import MxnetCollectives, collectives
from kolovod.surface import bind as _bind
from kolovod.surface.inplace import *
from kolovod.surface.verbs import *
from kolovod.surface.world import *

_store.register()
_functions = Functions(collectives)
_share_in_elastic_jobs(_functions)

broadcast_parameters = _functions.broadcast_parameters

__all__ = [
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Kolovod",
    "MxnetCollectives",
    "MxnetFrontend",
    "Payload",
    "broadcast_parameters",
    "collectives",
]
__all__ += _bind(globals(), collectives)

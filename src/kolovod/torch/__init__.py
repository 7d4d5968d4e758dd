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
from kolovod.core.short_verbs import ShortVerbs as _ShortVerbs
from kolovod.core.transfers import Transfers
from kolovod.gradients.compression import Compression, Compressor, Payload
from kolovod.metrics import Metrics as _Metrics
from kolovod.private_apis.torch import warn_of_older as _warn_of_older
from kolovod.surface import bind as _bind
from kolovod.surface.inplace import *
from kolovod.surface.transfers import *
from kolovod.surface.verbs import *
from kolovod.surface.world import *
from kolovod.torch import backward_span as _backward_span  # noqa: F401  # registers itself
from kolovod.torch import step_span as _step_span  # noqa: F401  # the same
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.comm_hooks import GradBucket
from kolovod.torch.diloco import DiLoCo
from kolovod.torch.elastic import share_in_elastic_jobs as _share_in_elastic_jobs
from kolovod.torch.frontend import TorchFrontend
from kolovod.torch.frontend import let_engine_read as _let_engine_read
from kolovod.torch.functions import Functions
from kolovod.torch.local_sgd import LocalSGD
from kolovod.torch.optimizer import DistributedOptimizer
from kolovod.torch.power_sgd import PowerSGD
from kolovod.torch.sync_batch_norm import SyncBatchNorm
from kolovod.torch.verbs import collectives

_warn_of_older()
_register()  # where torch has not done so itself, by the entry point in pyproject.toml
_functions = Functions(collectives)
_transfers = Transfers(collectives.frontend, collectives.world)
_share_in_elastic_jobs(_functions, _transfers)
_metrics = _Metrics(collectives)

broadcast_parameters = _functions.broadcast_parameters
broadcast_optimizer_state = _functions.broadcast_optimizer_state
average_metrics = _metrics.average_metrics
gather_samples = _metrics.gather_samples

__all__ = [
    "Compression",
    "Compressor",
    "DiLoCo",
    "DistributedOptimizer",
    "GradBucket",
    "LocalSGD",
    "Payload",
    "PowerSGD",
    "SyncBatchNorm",
    "TorchCollectives",
    "TorchFrontend",
    "average_metrics",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "collectives",
    "gather_samples",
]
_let_engine_read()
__all__ += _bind(globals(), _ShortVerbs(collectives, __name__), _transfers)

"""Kolovod on NumPy arrays, the reference for all front ends; ``kolovod`` itself re-exports it.

    import kolovod.numpy as kv

    kv.init()
    kv.broadcast_parameters(weights)  # a dict of arrays
    gradient = kv.allreduce(gradient, name="gradient")

docs/numpy.md says what arrays may be like.
"""

from __future__ import annotations

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import Array, NumpyFrontend
from kolovod.core.numpy_frontend import let_engine_read as _let_engine_read
from kolovod.core.short_verbs import ShortVerbs as _ShortVerbs
from kolovod.core.transfers import Transfers
from kolovod.core.world import current
from kolovod.numpy.functions import Functions
from kolovod.surface import bind as _bind
from kolovod.surface.inplace import *
from kolovod.surface.transfers import *
from kolovod.surface.verbs import *
from kolovod.surface.world import *

collectives: Collectives = Collectives(NumpyFrontend(), current)
_functions = Functions(collectives)
_transfers = Transfers(collectives.frontend, collectives.world)

broadcast_parameters = _functions.broadcast_parameters

__all__ = [
    "Array",
    "NumpyFrontend",
    "broadcast_parameters",
    "collectives",
]
_let_engine_read()
__all__ += _bind(globals(), _ShortVerbs(collectives, __name__), _transfers)

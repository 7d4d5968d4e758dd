"""Data-parallel training: processes that keep their copies of a model equal.

Start ``kolovod run -np 4 python train.py``, and in the script::

    import kolovod

    kolovod.init()
    mean = kolovod.allreduce(array)  # the average over all ranks, on every rank

This module works on NumPy arrays; ``kolovod.torch``, ``tensorflow``, ``keras``, ``jax`` and
``mxnet`` on those of the frameworks. Without the launcher a script runs as the only rank of a world
of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kolovod import starting as _starting  # noqa: F401

# isort: split
from kolovod import errors
from kolovod import numpy as _numpy
from kolovod.gradients.compression import Compression
from kolovod.numpy import broadcast_parameters
from kolovod.observe.last_operations import last_operations
from kolovod.surface import bind as _bind
from kolovod.surface.in_place import *
from kolovod.surface.transfers import *
from kolovod.surface.verbs import *
from kolovod.surface.world import *
from kolovod.version import __version__

if TYPE_CHECKING:
    from kolovod.launch.run import Progress, RankFailed, SshOptions, run

__all__ = [
    "Compression",
    "Progress",
    "RankFailed",
    "SshOptions",
    "__version__",
    "broadcast_parameters",
    "errors",
    "last_operations",
    "run",
]
__all__ += _bind(globals(), _numpy)


def __getattr__(name: str) -> Any:
    """``run`` and what belongs to it, when it is asked for: a rank starts no job."""
    if name in ("Progress", "RankFailed", "SshOptions", "run"):
        from kolovod.launch import run as launching

        return getattr(launching, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

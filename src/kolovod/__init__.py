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

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kolovod import starting as _starting  # noqa: F401
from kolovod.version import __version__

if TYPE_CHECKING:
    from kolovod import errors
    from kolovod.gradients.compression import Compression
    from kolovod.launch.run import Progress, RankFailed, SshOptions, run
    from kolovod.numpy import broadcast_parameters
    from kolovod.observe.last_operations import last_operations
    from kolovod.surface.inplace import *
    from kolovod.surface.transfers import *
    from kolovod.surface.verbs import *
    from kolovod.surface.world import *

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

_ELSEWHERE = {
    "Compression": "gradients.compression",
    "Progress": "launch.run",
    "RankFailed": "launch.run",
    "SshOptions": "launch.run",
    "broadcast_parameters": "numpy",
    "last_operations": "observe.last_operations",
    "run": "launch.run",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for: a command of ours needs no NumPy, and a rank starts no job."""
    if name.startswith("__") and name != "__all__":
        pass
    elif name in _ELSEWHERE:
        globals()[name] = getattr(import_module(f"{__name__}.{_ELSEWHERE[name]}"), name)
        return globals()[name]
    elif find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    elif name in (*_bound(), "__all__"):
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_bound()})


def _bound() -> list[str]:
    """``__all__``, once the verbs on NumPy arrays and all that has no framework are here."""
    names: dict[str, Any] = globals()
    if "__all__" not in names:
        from kolovod import numpy
        from kolovod.surface import bind, world

        given = names.copy()  # with what somebody has put in the place of a name
        names.update((name, getattr(world, name)) for name in world.__all__)
        bound = bind(names, numpy)
        names.update(given)
        names["__all__"] = sorted({*bound, *_ELSEWHERE, "__version__", "errors"})
    found: list[str] = names["__all__"]
    return found

"""Engines of others that carry the bytes, under our negotiation and order. Chosen by one option.

``KOLOVOD_BACKEND=mpi`` sends allreduce and broadcast through MPI. Allgather and barrier stay with
the native engine: only its negotiation knows the sizes.
"""

from __future__ import annotations

from importlib import import_module

from kolovod.backends.base import Backend, ExternalDriver
from kolovod.errors import InvalidArgumentError

_CLASSES = {"mpi": ("kolovod.backends.mpi", "MpiBackend")}


def load(name: str, world_rank: int, world_size: int) -> Backend:
    """Make the backend ``name`` for this rank. Collective: every rank loads the same one.

    Raises InvalidArgumentError for an unknown name, a library that is not installed, or processes
    that were not started the way the backend needs.
    """
    if name not in _CLASSES:
        known = ", ".join(["native", *sorted(_CLASSES)])
        raise InvalidArgumentError(f"backend is {name!r}: KOLOVOD_BACKEND can be one of {known}")
    module, class_name = _CLASSES[name]
    backend: Backend = getattr(import_module(module), class_name)(world_rank, world_size)
    return backend


__all__ = ["Backend", "ExternalDriver", "load"]

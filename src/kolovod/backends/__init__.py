"""Engines of others that carry the bytes, under our negotiation and order. Chosen by one option.

``KOLOVOD_BACKEND=mpi`` or ``gloo`` sends every bucket of every verb through MPI or Gloo. What is
ready on all ranks, and in which order it goes, is still the native engine's to say, and so a
barrier, which has no bytes, is its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kolovod.backends.base import Backend
from kolovod.backends.driver import ExternalDriver
from kolovod.backends.setup import BackendSetup
from kolovod.core.affinity import threads_on
from kolovod.core.objects import Objects
from kolovod.core.world import World
from kolovod.errors import InvalidArgumentError

_CLASSES = {
    "gloo": ("kolovod.backends.gloo", "GlooBackend"),
    "mpi": ("kolovod.backends.mpi", "MpiBackend"),
}


def start(name: str, world: World) -> ExternalDriver:
    """Let the backend ``name`` carry the bytes of ``world``. Collective: the same on every rank.

    The engine was made with ``external=True``. Raises InvalidArgumentError for an unknown name, a
    library that is not installed, or processes that were not started the way the backend needs;
    BootstrapError when that happened to another rank; RankLostError.
    """
    meeting = BackendSetup(Objects(lambda: world))
    try:
        backend = load(name, world, meeting)
    except Exception as error:  # of a library that we do not know
        meeting.fail(error)
        raise
    try:
        meeting.finish()
    except BaseException:
        backend.close()
        raise
    try:
        driver = ExternalDriver(world.engine, backend, world.rank, world.size)
        with threads_on(world.core):
            driver.start()
    except BaseException:
        backend.close()  # which the driver's thread would do
        raise
    return driver


def load(name: str, world: World, meeting: BackendSetup) -> Backend:
    """Make this rank's backend ``name``. See ``start``."""
    if name not in _CLASSES:
        known = ", ".join(["native", *sorted(_CLASSES)])
        raise InvalidArgumentError(f"backend is {name!r}: KOLOVOD_BACKEND can be one of {known}")
    module, class_name = _CLASSES[name]
    made: Any = getattr(import_module(module), class_name)
    backend: Backend = made(world, meeting)
    return backend


__all__ = ["Backend", "ExternalDriver", "load", "start"]

"""Engines of others that carry the bytes, under our negotiation and order. Chosen by one option.

``KOLOVOD_BACKEND=mpi`` or ``gloo`` sends every bucket of every verb through MPI or Gloo; ``nccl``
those of tensors on GPUs through NCCL. What is ready on all ranks, and in which order it goes, is
still the native engine's to say, and so a barrier, which has no bytes, is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.backends.base import Backend
from kolovod.backends.carrier import Carrier
from kolovod.backends.setup import BackendSetup, RankGroup
from kolovod.core.affinity import threads_on
from kolovod.core.world import World
from kolovod.errors import SettingError


class _Kind(NamedTuple):
    """One backend."""

    module: str
    class_name: str
    device: str
    """The tensors that it carries, as ``_native.Engine`` calls them: "host" or "gpu"."""


_KINDS = {
    "gloo": _Kind("kolovod.backends.gloo", "GlooBackend", "host"),
    "mpi": _Kind("kolovod.backends.mpi", "MpiBackend", "host"),
    "nccl": _Kind("kolovod.backends.nccl", "NcclBackend", "gpu"),
}


def device_of(name: str) -> str:
    """Return whose tensors the backend ``name`` carries: "host", "gpu", or "" (the native one)."""
    return _KINDS[name].device if name in _KINDS else ""


def start(name: str, world: World, engine: _native.Engine, ranks: Sequence[int]) -> Carrier:
    """Let the backend ``name`` carry bytes among ``ranks`` of ``world``. Collective.

    ``engine``: theirs, made with ``external=device_of(name)``. Raises InvalidArgumentError for an
    unknown name, a library that is not installed, or processes that were not started the way the
    backend needs; BootstrapError when that happened to another rank; RankLostError.
    """
    rank_group = RankGroup(world, engine, ranks.index(world.rank), len(ranks))
    meeting = BackendSetup(rank_group.objects())
    try:
        backend = load(name, rank_group, meeting)
    except Exception as error:  # of a library that we do not know
        meeting.fail(error)
        raise
    try:
        meeting.finish()
    except BaseException:
        backend.close(is_healthy=False)
        raise
    try:
        carrier = Carrier(engine, backend, rank_group.rank, rank_group.size)
        with threads_on(world.core):
            carrier.start()
    except BaseException:
        backend.close(is_healthy=False)  # which the carrier's thread would do
        raise
    return carrier


def load(name: str, rank_group: RankGroup, meeting: BackendSetup) -> Backend:
    """Make this rank's backend ``name``. See ``start``."""
    if name not in _KINDS:
        known = ", ".join(["native", *sorted(_KINDS)])
        raise SettingError(f"backend is {name!r}: KOLOVOD_BACKEND can be one of {known}")
    made: Any = getattr(import_module(_KINDS[name].module), _KINDS[name].class_name)
    backend: Backend = made(rank_group, meeting)
    return backend


__all__ = ["Backend", "Carrier", "device_of", "load", "start"]

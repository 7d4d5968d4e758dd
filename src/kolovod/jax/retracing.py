"""Programs that depend on which rank of how many this is are traced anew in another place.

JAX traces a function once, and what Python tells it then is a constant of the program: ``size()``,
the shape of a gathered array. So whoever asks for the place of this rank while JAX traces is noted,
and when the process enters a world in which it has another one, JAX forgets its programs. Programs
in which nobody has asked (those that average gradients, say) never cost anybody a compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from kolovod.core import world as worlds

_RankInfo = tuple[int, ...]
_is_running: ContextVar[bool] = ContextVar("kolovod.running", default=False)
_rank_info_of_programs: _RankInfo | None = None
"""The info that programs which JAX keeps depend on; None: they depend on none."""

# Tracing is no public state, but what is bound while JAX traces comes to the rule for tracing.
_asked = Primitive("kolovod_place")
_asked.multiple_results = True


def _rank_info(world: worlds.World) -> _RankInfo:
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.cross_rank,
        world.cross_size,
    )


def note_rank_info() -> None:
    """Note that a program that is being traced is for this rank of the present world."""
    global _rank_info_of_programs
    if worlds.is_initialized():
        _rank_info_of_programs = _rank_info(worlds.current())


def _traced() -> list[Any]:
    note_rank_info()
    return []


_asked.def_impl(lambda: [])
_asked.def_abstract_eval(_traced)
mlir.register_lowering(_asked, lambda context: [])
batching.primitive_batchers[_asked] = lambda arrays, dims: ([], [])


def _forget_programs(world: worlds.World) -> None:
    global _rank_info_of_programs
    if _rank_info_of_programs not in (None, _rank_info(world)) and not _is_running.get():
        _rank_info_of_programs = None
        jax.clear_caches()


def forget_late() -> None:
    """Do what was left undone where a world was entered within a program that ran."""
    if worlds.is_initialized():
        _forget_programs(worlds.current())


@contextmanager
def running() -> Iterator[None]:
    """Within this context this thread runs a step of a program, and JAX keeps its programs."""
    token = _is_running.set(True)
    try:
        yield
    finally:
        _is_running.reset(token)


def is_running() -> bool:
    """Return whether this thread runs a step of a program."""
    return _is_running.get()


def register() -> None:
    """Begin to note whether the place is asked for while JAX traces; called once."""
    worlds.when_rank_is_asked(lambda: _asked.bind() and None)
    worlds.when_entered(_forget_programs)

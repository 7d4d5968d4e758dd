"""Errors of programs of TensorFlow or JAX that lose a rank, made the one that ``run`` expects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import kolovod
from horovod.common.elastic import next_world, run_fn
from horovod.common.exceptions import HorovodInternalError

__all__ = ["raising_horovods", "run"]

P = ParamSpec("P")
R = TypeVar("R")

_OF_A_LOST_WORLD = ("AbortedError", "CancelledError", "UnknownError")
"""In ``tf.errors``: ours is the first; operations that wait for one that has failed are cancelled.
The last is Horovod's, in scripts that raise it themselves."""

_ABORTED_IN_JAX = "ABORTED: "
"""How the text of such an error begins; its class is one of Python's."""


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Enter ``func(state, ...)`` again in each world; see horovod.common.elastic.run_fn."""
    return run_fn(raising_horovods(func), next_world)


def raising_horovods(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``function`` raise HorovodInternalError where an operation in a graph has failed."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, HorovodInternalError) or not _is_of_a_lost_world(error):
                raise
            raise HorovodInternalError(str(error)) from error

    return run


def _is_of_a_lost_world(error: Exception) -> bool:
    if not kolovod.is_initialized():
        return False
    if "jax" in sys.modules and isinstance(error, (ValueError, RuntimeError)):
        return str(error).startswith(_ABORTED_IN_JAX)
    names = (
        kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("tensorflow.")
    )
    found = next((name for name in names if name in _OF_A_LOST_WORLD), "")
    return found != "" and (found != "UnknownError" or "Horovod" in str(error))

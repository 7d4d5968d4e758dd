"""Errors of eager verbs, which are Kolovod's and TensorFlow's at once.

Inside a graph an operation fails with an error of ``tf.errors``. So that a script may catch that in
both modes, what a verb raises in Python is of the class of ``kolovod.errors`` and of the same class
of ``tf.errors`` that its op fails with. AutoGraph knows how to make such an error anew, with
the line of the function that is traced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from kolovod import errors
from kolovod.errors import KolovodError

# The first that fits; csrc/bind/tf_ops_facts.cc has the same.
_KINDS: tuple[tuple[type[KolovodError], Any], ...] = (
    (errors.DuplicateNameError, tf.errors.AlreadyExistsError),
    (errors.InvalidArgumentError, tf.errors.InvalidArgumentError),
    (errors.MismatchError, tf.errors.FailedPreconditionError),
    (errors.NotInitializedError, tf.errors.AbortedError),
    (errors.CollectiveAbortedError, tf.errors.AbortedError),
    (errors.WaitTimeoutError, tf.errors.DeadlineExceededError),
    (KolovodError, tf.errors.InternalError),
)

F = TypeVar("F", bound=Callable[..., Any])


def raising_tensorflows(function: F) -> F:
    """Have ``function`` raise such errors, and AutoGraph, which rewrites functions, skip it."""

    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except KolovodError as error:
            raise as_tensorflow(error) from None

    signature = inspect.signature(function)
    made: Any = tf.autograph.experimental.do_not_convert(run)
    # Given to a tf.function as an argument, it would be replaced by what it wraps.
    vars(made).pop("__wrapped__", None)
    made.__signature__ = signature
    return made  # type: ignore[no-any-return]


_made_before: dict[type[KolovodError], Any] = {}


def as_tensorflow(error: KolovodError) -> KolovodError:
    """Return ``error`` with TensorFlow's class of it as a base, too."""
    known: bool = isinstance(error, tf.errors.OpError)
    return error if known else _made(type(error), str(error), getattr(error, "rank", None))


def _made(kind: type[KolovodError], message: str, rank: int | None) -> KolovodError:
    made: KolovodError = _both(kind)(None, None, message)
    if isinstance(made, errors.CollectiveAbortedError):
        made.rank = rank
    return made


def _both(kind: type[KolovodError]) -> Any:
    made = _made_before.get(kind)
    if made is not None:
        return made
    base = next(theirs for ours, theirs in _KINDS if issubclass(kind, ours))

    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        base.__init__(self, node_def, op, message, *args)
        if issubclass(kind, errors.CollectiveAbortedError):
            self.rank = None

    def __reduce__(self: Any) -> Any:
        return _made, (kind, str(self), getattr(self, "rank", None))

    members = {
        "__init__": __init__,
        "__reduce__": __reduce__,
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made = _made_before[kind] = type(kind.__name__, (kind, base), members)
    return made

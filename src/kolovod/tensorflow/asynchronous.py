"""Asynchronous verbs: outside of graphs only, with handles whose errors are TensorFlow's, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from kolovod.core.handles import Handle
from kolovod.errors import FrontEndArgumentError, KolovodError
from kolovod.tensorflow.errors import as_tensorflow, raising_tensorflows

F = TypeVar("F", bound=Callable[..., Any])


def eager(method: F) -> F:
    """Have ``method``, an asynchronous verb, raise InvalidArgumentError in a graph."""

    @functools.wraps(method)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if not tf.executing_eagerly():
            raise FrontEndArgumentError(
                "inside tf.function all verbs are asynchronous and have no handles: leave '_async' "
                "out"
            )
        return method(*arguments, **keywords)

    return raising_tensorflows(run)  # type: ignore[return-value]


class TensorflowHandle(Handle[Any]):
    """A Handle whose errors are TensorFlow's, too."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Do as a Handle does."""
        try:
            return super().wait(timeout_s)
        except KolovodError as error:
            raise as_tensorflow(error) from None

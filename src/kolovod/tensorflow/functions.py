"""Starting equal: variables and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from kolovod.core.objects import Objects
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import agree
from kolovod.numpy import broadcast_object
from kolovod.numpy import collectives as _on_arrays
from kolovod.tensorflow import graph
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.exchange import variable_of
from kolovod.tensorflow.frontend import DTYPES
from kolovod.tensorflow.verbs import collectives

__all__ = ["broadcast_object_fn", "broadcast_variables"]


@raising_tensorflows
def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet | None = None
) -> tf.Operation | None:
    """Overwrite ``variables`` with those of ``root_rank``, in place.

    ``variables``: of TensorFlow or Keras, in the same order on all ranks: ``model.variables``, and
    ``optimizer.variables`` once it has them (after its first step, or its ``build``). Works in a
    ``tf.function`` too, and in a graph of TensorFlow 1, where it returns the op to run. Raises
    InvalidArgumentError for what is no variable and for dtypes not known; MismatchError, on every
    rank, when shapes or dtypes differ between ranks.
    """
    given = [_checked(variable, i) for i, variable in enumerate(variables)]
    if not tf.executing_eagerly():
        done = [v.assign(_broadcast(v, root_rank, process_set)) for v in given]
        return tf.group(done) if graph.is_of_session() else None
    described = [(str(i), (tuple(v.shape), v.dtype.name)) for i, v in enumerate(given)]
    agree(Objects(_on_arrays.world), described, "variable", "broadcast_variables", process_set)
    handles = [
        collectives.broadcast_async(variable.read_value(), root_rank, None, process_set)
        for variable in given
    ]
    for variable, handle in zip(given, handles, strict=True):
        variable.assign(handle.wait())
    return None


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Callable[[Any], Any]:
    """Return ``broadcast_object`` with all its arguments but the object."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def _broadcast(variable: tf.Variable, root_rank: int, process_set: ProcessSet | None) -> tf.Tensor:
    return collectives.broadcast(variable.read_value(), root_rank, None, process_set)


def _checked(variable: Any, position: int) -> tf.Variable:
    found = variable_of(variable)
    if not isinstance(found, tf.Variable):
        raise FrontEndArgumentError(
            f"variables[{position}] is a {type(variable).__name__}, not a variable; send other "
            "values with broadcast_object"
        )
    if found.dtype.base_dtype not in DTYPES:
        known = ", ".join(dtype.name for dtype in DTYPES)
        raise FrontEndArgumentError(
            f"variables[{position}] ('{found.name}') is {found.dtype.name}: only {known} can be "
            "broadcast; send others with broadcast_object"
        )
    return found

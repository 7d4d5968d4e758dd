"""The rank and the size of this process, as tensors that a graph asks for when it is run.

``rank()`` in a ``tf.function`` is a number of the time when it was traced; these follow when the
process is in another world later. A graph that asks while there is no world, or for the size of a
process set that this rank is not in, fails with ``tf.errors.AbortedError``.
"""

from __future__ import annotations

import tensorflow as tf

from kolovod.core.process_sets import global_process_set
from kolovod.core.world import current
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow import graph
from kolovod.tensorflow.errors import raising_tensorflows


def rank_op(name: str | None = None) -> tf.Tensor:
    """``rank()`` as an int32 scalar that a graph asks for when it is run."""
    return _fact("rank", name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set, or with 0 the world, when the graph is run."""
    return _fact("size", process_set_id, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """``local_rank()`` as an int32 scalar that a graph asks for when it is run."""
    return _fact("local_rank", name=name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """``local_size()`` as an int32 scalar that a graph asks for when it is run."""
    return _fact("local_size", name=name)


def cross_rank_op(name: str | None = None) -> tf.Tensor:
    """``cross_rank()`` as an int32 scalar that a graph asks for when it is run."""
    return _fact("cross_rank", name=name)


def cross_size_op(name: str | None = None) -> tf.Tensor:
    """``cross_size()`` as an int32 scalar that a graph asks for when it is run."""
    return _fact("cross_size", name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set when the graph is run, else 0; an int32 scalar."""
    return _fact("included", process_set_id, name)


@raising_tensorflows
def _fact(fact: str, process_set: int = 0, name: str | None = None) -> tf.Tensor:
    if not tf.executing_eagerly():
        return graph.fact(fact, process_set, name)
    world = current()
    members = world.sets.by_id.get(process_set) if process_set else global_process_set
    if fact == "included":
        value = int(members is not None and members.included())
    elif fact == "size":
        if members is None:
            raise FrontEndArgumentError(f"there is no process set {process_set}")
        value = members.size()
    else:
        value = getattr(world, fact)
    return tf.constant(value, tf.int32)

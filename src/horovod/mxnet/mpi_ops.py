"""Horovod's verbs on MXNet's arrays.

``priority`` is a hint to Horovod's queue, and of no use here: what is ready is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np

from horovod.common import surface as _surface
from horovod.common.arguments import named, op_of
from horovod.common.process_sets import group_of
from horovod.common.surface import *
from kolovod.errors import FrontEndArgumentError
from kolovod.mxnet import collectives

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]
__all__ += _surface.__all__

Array: TypeAlias = "mx.nd.NDArray"
Arrays: TypeAlias = "Sequence[mx.nd.NDArray]"


def _of_one(verb: str, doc: str) -> Callable[..., Array]:
    """Make a form of allreduce for one array."""
    form = getattr(collectives, verb)

    def run(
        tensor: Array,
        average: bool | None = None,
        name: str | None = None,
        priority: int = 0,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
        op: int | None = None,
    ) -> Array:
        scales = prescale_factor, postscale_factor
        label, group = named("allreduce", name), group_of(process_set)
        return form(tensor, label, op_of(op, average), *scales, group)

    run.__name__, run.__qualname__, run.__doc__ = verb, verb, doc
    return run


def _of_several(verb: str, doc: str) -> Callable[..., list[Array]]:
    """Make a form of allreduce for a group of arrays."""
    form = getattr(collectives, verb)

    def run(
        tensors: Arrays,
        average: bool | None = None,
        name: str | None = None,
        priority: int = 0,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
        op: int | None = None,
    ) -> list[Array]:
        scales = prescale_factor, postscale_factor
        label, group = named("grouped_allreduce", name), group_of(process_set)
        return form(tensors, label, op_of(op, average), *scales, group)  # type: ignore[no-any-return]

    run.__name__, run.__qualname__, run.__doc__ = verb, verb, doc
    return run


allreduce = _of_one("allreduce", "The ranks' arrays combined, as a new array.")
allreduce_ = _of_one("allreduce_", "``allreduce`` in place.")
grouped_allreduce = _of_several(
    "grouped_allreduce", "``allreduce`` of several arrays as one operation."
)
grouped_allreduce_ = _of_several("grouped_allreduce_", "``grouped_allreduce`` in place.")


def allgather(
    tensor: Array, name: str | None = None, priority: int = 0, process_set: Any = global_process_set
) -> Array:
    """The ranks' arrays one after the other; their first dimensions may differ."""
    return collectives.allgather(tensor, named("allgather", name), group_of(process_set))


def grouped_allgather(
    tensors: Arrays,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
) -> list[Array]:
    """``allgather`` of several arrays as one operation."""
    label, group = named("grouped_allgather", name), group_of(process_set)
    return collectives.grouped_allgather(tensors, label, group)


def broadcast(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
) -> Array:
    """``root_rank``'s values as a new array. ``root_rank`` is one of the world."""
    label, group = named("broadcast", name), group_of(process_set)
    return collectives.broadcast(tensor, root_rank, label, group)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
) -> Array:
    """``broadcast`` in place."""
    label, group = named("broadcast", name), group_of(process_set)
    return collectives.broadcast_(tensor, root_rank, label, group)


def alltoall(
    tensor: Array,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
) -> Any:
    """Send rows to every rank, and receive rows from every rank.

    ``splits``: a list or an array of whole numbers. Returns the array, and with ``splits`` also how
    many rows each rank sent, an int32 array.
    """
    label, group = named("alltoall", name), group_of(process_set)
    result, received = collectives.alltoall(tensor, _splits(splits), label, group)
    if splits is None:
        return result
    module = mx.np if isinstance(tensor, mx.np.ndarray) else mx.nd
    return result, module.array(received, dtype="int32")


def reducescatter(
    tensor: Array,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """``allreduce`` of which each rank keeps a part of the rows."""
    scales = prescale_factor, postscale_factor
    label, group = named("reducescatter", name), group_of(process_set)
    return collectives.reducescatter(tensor, label, op, *scales, group)


def grouped_reducescatter(
    tensors: Arrays,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """``reducescatter`` of several arrays as one operation."""
    scales = prescale_factor, postscale_factor
    label, group = named("grouped_reducescatter", name), group_of(process_set)
    return collectives.grouped_reducescatter(tensors, label, op, *scales, group)


def _splits(splits: Any) -> Any:
    """A list where ``splits`` is an array. Raises ValueError for no whole numbers."""
    if not isinstance(splits, mx.nd.NDArray):
        return splits
    if splits.ndim != 1 or np.dtype(splits.dtype).kind not in "iu":
        raise FrontEndArgumentError(
            f"splits has shape {splits.shape} and dtype {np.dtype(splits.dtype).name}: give one "
            "whole number of rows for each rank"
        )
    return splits.asnumpy().tolist()

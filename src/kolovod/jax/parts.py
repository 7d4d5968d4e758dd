"""Parts of each array of a tree, one for each rank, and how gradients and parameters travel.

An array of n elements is seen as a row of ceil(n / size) elements for each rank, with zeros behind
the last element. So all ranks have the same shapes, as programs of JAX must. A part has as many
dimensions as the array, since masks look at them (weight decay "where ndim > 1"): all are 1 but the
last. A scalar is on rank 0, and the others have a zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp

from kolovod.gradients import exchange, plan
from kolovod.gradients.spec import ReduceSpec
from kolovod.jax.verbs import JaxCollectives

Shape = tuple[int, ...]


def part_shape(shape: Shape, size: int) -> Shape:
    """Return the shape of the part that each of ``size`` ranks has of an array."""
    if size == 1 or not shape:
        return shape
    return (*(1,) * (len(shape) - 1), _length(shape, size))


def part_of(array: Any, rank: Any, size: int) -> jax.Array:
    """Return the part that ``rank`` has of ``array``, of shape ``part_shape``.

    ``rank``: int32, (): a value, not a constant of the program. So the programs of all ranks are
    the same, and XLA comes to their operations in the same order.
    """
    if size == 1:
        return jnp.asarray(array)
    row = jax.lax.dynamic_index_in_dim(_rows(array, size), rank, keepdims=False)
    return row.reshape(part_shape(jnp.shape(array), size))


def _length(shape: Shape, size: int) -> int:
    """The number of elements of a rank's part."""
    return -(-math.prod(shape) // size)


def _rows(array: Any, size: int) -> jax.Array:
    """``array`` in the shape (ranks, elements of a part), with zeros behind its elements."""
    flat, length = jnp.reshape(array, -1), _length(jnp.shape(array), size)
    padding = size * length - flat.size
    return (jnp.pad(flat, (0, padding)) if padding else flat).reshape(size, length)


class Carrier:
    """Sends arrays of a tree, in buckets, to and from the parts that ranks have."""

    def __init__(self, verbs: JaxCollectives, spec: ReduceSpec, size: int) -> None:
        """``size``: the number of ranks that have parts."""
        self._verbs, self._spec, self._size = verbs, spec, size

    def scattered(
        self, name: str, arrays: Sequence[Any], further: Sequence[Any] = ()
    ) -> tuple[list[Any], list[Any]]:
        """Return this rank's parts of ``arrays``, combined as the spec says.

        ``further``: what has a row for each rank already; of each, this rank's, flat, comes second.
        """
        size = self._size
        rows = [*(_rows(array, size) for array in arrays), *further]
        received = self._carried("reducescatter", name, rows, [*arrays, *further])
        parts = [
            row.reshape(part_shape(jnp.shape(array), size))
            for row, array in zip(received, arrays, strict=False)
        ]
        return parts, [row.reshape(-1) for row in received[len(arrays) :]]

    def gathered(
        self,
        name: str,
        parts: Sequence[Any],
        shapes: Sequence[Shape],
        further: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any]]:
        """The arrays of ``shapes`` that ranks have ``parts`` of, the same on all ranks.

        ``further``: rows of this rank's, flat; all ranks' rows of each come second.
        """
        rows = [
            jnp.reshape(part, (1, _length(shape, self._size)))
            for part, shape in zip(parts, shapes, strict=True)
        ]
        wholes = [
            jax.ShapeDtypeStruct(shape, part.dtype)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        size = self._size
        rows += [jnp.reshape(row, (1, -1)) for row in further]
        wholes += [jax.ShapeDtypeStruct((size, row.size), row.dtype) for row in further]
        received = self._carried("allgather", name, rows, wholes)
        arrays = [
            each.reshape(-1)[: math.prod(shape)].reshape(shape)
            for each, shape in zip(received, shapes, strict=False)
        ]
        all_rows = zip(received[len(parts) :], further, strict=True)
        return arrays, [each.reshape(size, row.size) for each, row in all_rows]

    def _carried(
        self, verb: str, name: str, rows: Sequence[Any], wholes: Sequence[Any]
    ) -> list[Any]:
        """``verb`` on ``rows``; buckets are cut by the bytes of ``wholes``, which they belong to.

        Rows without elements stay at home.
        """
        is_traced = any(isinstance(row, jax.core.Tracer) for row in rows)
        submit = exchange.by(self._verbs, self._spec, at_once=is_traced)
        waiting = []
        for number, groups in enumerate(_buckets(wholes)):
            sent = [_joined([rows[i] for i in group]) for group in groups]
            waiting.append((groups, submit(verb, f"{name}.{number}", sent, ())))
        received = [pair for groups, wait in waiting for pair in zip(groups, wait(), strict=True)]
        arrays = [array for _, array in received]
        if len(waiting) > 1:
            arrays = self._verbs.together(arrays, self._spec.process_set)
        results = list(rows)
        for (group, _), array in zip(received, arrays, strict=True):
            if len(group) == 1:
                results[group[0]] = array
                continue
            ends = accumulate((rows[i].shape[1] for i in group), initial=0)
            for i, (begin, end) in zip(group, pairwise(ends), strict=True):
                results[i] = array[:, begin:end]
        return results


def _buckets(arrays: Sequence[Any]) -> list[list[list[int]]]:
    """Return the buckets, each as lists of the numbers of arrays that are sent as one.

    Backward comes to the last layers first, as far as a tree is in their order.
    """
    sizes = {
        i: arrays[i].size * arrays[i].dtype.itemsize
        for i in reversed(range(len(arrays)))
        if arrays[i].size
    }
    buckets = []
    for bucket in plan.cut(sizes):
        small: dict[Any, list[int]] = {}
        for i in bucket:
            if sizes[i] < plan.ALONE_BYTES:
                small.setdefault(arrays[i].dtype, []).append(i)
        alone = [[i] for i in bucket if sizes[i] >= plan.ALONE_BYTES]
        buckets.append([*alone, *small.values()])
    return buckets


def _joined(rows: Sequence[Any]) -> Any:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)

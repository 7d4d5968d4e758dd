"""The exchange of a step's gradients in an elastic job, where it is repeated if a rank is lost.

A graph never sees a half of it: it calls Python once with all gradients, and gets the results when
every rank has them (kolovod/elastic/steps.py). So no variable changes before, and what the graph
has computed is there to be sent once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.transaction import transaction

Gradients = Sequence[Any]
"""Tensors, tf.IndexedSlices, and None for no gradient."""


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def run_in_transaction(
    combine: Callable[[Gradients], Gradients], gradients: Gradients, *, counts: bool
) -> list[Any]:
    """``combine(gradients)`` as a step; in a graph when that is run.

    ``combine``: returns, for eager tensors, as many of the same kinds, dtypes and shapes (but for
    the rows of slices), and changes none. ``counts``: see ``elastic.exactly``.
    """
    if tf.executing_eagerly():
        return list(transaction().run(lambda: combine(gradients), counts=counts))

    def run(*values: tf.Tensor) -> list[tf.Tensor]:
        parts = iter(values)
        own = [_like(gradient, parts) for gradient in gradients]
        results = transaction().run(lambda: combine(own), counts=counts)
        return [part for result in results for part in _parts(result)]

    sent = [part for gradient in gradients for part in _parts(gradient)]
    if not sent:
        return list(gradients)
    with tf.device("CPU:0"):  # where all front ends' tensors are
        received = iter(tf.py_function(run, sent, [part.dtype for part in sent]))
    return [_shaped(_like(gradient, received), gradient) for gradient in gradients]


def _parts(gradient: Any) -> list[tf.Tensor]:
    """Return the tensors that are sent of a gradient."""
    if gradient is None:
        return []
    if not isinstance(gradient, tf.IndexedSlices):
        return [tf.convert_to_tensor(gradient)]
    parts = gradient.values, gradient.indices, gradient.dense_shape
    return [part for part in parts if part is not None]


def _like(gradient: Any, parts: Iterator[tf.Tensor]) -> Any:
    """The next of ``parts`` as what ``gradient`` is."""
    taken = [next(parts) for _ in _parts(gradient)]
    if gradient is None:
        return None
    return tf.IndexedSlices(*taken) if isinstance(gradient, tf.IndexedSlices) else taken[0]


def _shaped(result: Any, gradient: Any) -> Any:
    """``result`` with the shape that is known of ``gradient``: Python tells a graph none."""
    if isinstance(result, tf.IndexedSlices):
        result.values.set_shape([None, *gradient.values.shape[1:]])
        result.indices.set_shape([None])
        if result.dense_shape is not None:
            result.dense_shape.set_shape(gradient.dense_shape.shape)
    elif result is not None:
        result.set_shape(gradient.shape)
    return result

"""Sums of ``tf.IndexedSlices``: all ranks' slices, one after the other.

The same index may come several times then, as in what TensorFlow itself makes of a lookup; the
optimizers that take slices add them up.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kolovod.core.collectives import Collectives
from kolovod.core.ops import Average, Op, Sum
from kolovod.core.submission import Request
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow import gradients
from kolovod.tensorflow.differentiable import VerbsOfSet


def summed(
    verbs: Collectives, slices: Sequence[tf.IndexedSlices], request: Request
) -> list[tf.IndexedSlices]:
    """All ranks' slices, as one: the sum, once those of the same index are added."""
    op, scales, process_set = request.op, (request.prescale, request.postscale), request.process_set
    if op not in (Average, Sum):
        label = Op(op).name if op in list(Op) else repr(op)
        raise FrontEndArgumentError(
            f"tf.IndexedSlices with op {label}: give Average or Sum, or "
            "tf.convert_to_tensor(slices)"
        )
    changed = op == Average or scales != (1.0, 1.0)
    for one in slices:
        if changed and not one.values.dtype.is_floating:
            raise FrontEndArgumentError(
                f"tf.IndexedSlices of {one.values.dtype.name} can only be summed, without "
                "factors: give op=Sum"
            )
    parts = [part for one in slices for part in (one.values, one.indices)]
    gathered = verbs.grouped_allgather(parts, request.name, process_set)
    members = VerbsOfSet(verbs, process_set)
    return [
        tf.IndexedSlices(
            gradients.scaled(values, op, scales, members), indices, dense_shape=one.dense_shape
        )
        for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]

"""Allreduce as an op of a TensorFlow graph (csrc/bind/tf_ops.cc).

The op is made with public functions alone. Its kernel is asynchronous: all the allreduces of a
graph whose inputs are ready are on their way together, and the engine fuses them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kolovod import _native
from kolovod.errors import InvalidArgumentError
from kolovod.ops import Op

OP_TYPE = "KolovodAllreduce"
_TOO_LARGE_TO_COPY = 1024  # elements; up to 128 are


def register() -> None:
    """Make the op known to TensorFlow. Raises ImportError when it cannot be."""
    error = _native.register_tensorflow_ops()
    if error:
        raise ImportError(f"kolovod.tensorflow with TensorFlow {tf.__version__}: {error}")


def allreduce(
    tensors: Sequence[Any],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: int,
) -> list[tf.Tensor]:
    """Add one op to the graph that is being built; it reduces ``tensors`` as one group.

    ``process_set``: the number of one. ``name`` None: the operation is named after its node, so
    that ranks which build the same graph agree, however often each of them has traced it.
    """
    if op not in _native.OPS.values():
        known = ", ".join(member.name for member in Op)
        raise InvalidArgumentError(f"op is {op!r}: give one of {known}")
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise InvalidArgumentError(
            "graphs and sessions of TensorFlow 1 are not supported; use tf.function"
        )
    graph = tf.compat.v1.get_default_graph()
    inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not inputs:
        return []
    types = [tensor.dtype.as_datatype_enum for tensor in inputs]
    attribute = tf.compat.v1.AttrValue
    attributes = {
        "T": attribute(list=attribute.ListValue(type=types)),
        "op": attribute(i=int(op)),
        "prescale_bits": attribute(i=_bits(scales[0])),
        "postscale_bits": attribute(i=_bits(scales[1])),
        "process_set": attribute(i=process_set),
        "tensor_name": attribute(s=(name or "").encode()),
        # Two ops of one graph that are alike but for this are two operations.
        "unique_name": attribute(s=graph.unique_name(OP_TYPE, mark_as_used=False).encode()),
    }
    node = graph.create_op(
        OP_TYPE,
        [_anchor(), *inputs],
        [tensor.dtype for tensor in inputs],
        name=OP_TYPE,
        attrs=attributes,
    )
    return list(node.outputs)


@functools.cache
def _anchor() -> tf.Tensor:
    """An input that makes no graph's op one of constants only.

    Such an op TensorFlow runs once, while it optimizes the graph, and keeps the result. A tensor
    from outside becomes an argument of the function, unless it is so small that it is copied in.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.zeros([_TOO_LARGE_TO_COPY], tf.uint8)


def _bits(value: float) -> int:
    """A float64 as the integer of the same bits; TensorFlow's own float attribute has 32."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits

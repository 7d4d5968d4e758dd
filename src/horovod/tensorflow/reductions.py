"""Horovod's allreduce and reducescatter, and their grouped forms.

``device_dense`` and ``device_sparse`` have no effect: the engine works in host memory, where
TensorFlow's ops of it are. ``ignore_name_scope`` neither: scopes keep operations apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.arguments import check_adasum, op_of
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import global_process_set, group_of
from horovod.tensorflow import gradients
from horovod.tensorflow.arguments import named, several
from horovod.tensorflow.compression import Compression
from kolovod.core.codecs import codec_in
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.gradients import scaled
from kolovod.tensorflow.verbs import collectives

Tensor = Any


@raising_tensorflows
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Tensor:
    """The ranks' tensors combined; has a gradient.

    tf.IndexedSlices become those of all ranks, one after the other. Raises NotImplementedError for
    them with another op than Average and Sum, or with factors.
    """
    arguments = op, average, prescale_factor, postscale_factor
    return _reduced([tensor], "allreduce", name, compression, arguments, process_set)[0]


@raising_tensorflows
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Tensor]:
    """``allreduce`` of several tensors, dense or sparse, as one operation."""
    if not tensors:
        return tensors  # type: ignore[return-value]
    arguments = op, average, prescale_factor, postscale_factor
    given = several(tensors)
    return _reduced(given, "grouped_allreduce", name, compression, arguments, process_set)


@raising_tensorflows
def _allreduce(
    tensor: Tensor,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensor:
    """``allreduce`` as horovod.tensorflow.mpi_ops has it, with Sum by default."""
    arguments = op, None, prescale_factor, postscale_factor
    return _reduced([tensor], "allreduce", name, Compression.none, arguments, process_set)[0]


def _reduced(
    tensors: list[Tensor],
    verb: str,
    name: str | None,
    compression: Any,
    arguments: tuple[Any, Any, float, float],
    process_set: Any,
) -> list[Tensor]:
    op, average, prescale, postscale = arguments
    op = op_of(op, average)
    group = group_of(process_set)
    check_adasum(op, group, collectives)
    results = list(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    if sparse and (op not in (Average, Sum) or prescale != 1.0 or postscale != 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices can be added up and averaged, without factors: use op Average or "
            "Sum, or tf.convert_to_tensor"
        )
    with named(verb, name) as full_name:
        if dense:
            small = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
            inputs = [tensor for tensor, _ in small]
            how = op, prescale, postscale, group, codec_in(compression)
            outputs = gradients.allreduce(inputs, full_name, *how)
            for i, output, (_, context) in zip(dense, outputs, small, strict=True):
                results[i] = compression.decompress(output, context)
        if sparse:
            parts = [part for i in sparse for part in (tensors[i].values, tensors[i].indices)]
            sparse_name = full_name and f"{full_name}.sparse"
            gathered = iter(gradients.allgather(parts, sparse_name, group))
            members = VerbsOfSet(collectives, group)
            for i in sparse:
                values, indices = next(gathered), next(gathered)
                values = scaled(values, op, (1.0, 1.0), members)
                results[i] = tf.IndexedSlices(values, indices, tensors[i].dense_shape)
    return results


@raising_tensorflows
def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """``allreduce`` of which each rank keeps a part of the rows; has a gradient."""
    scales = prescale_factor, postscale_factor
    with named("reducescatter", name) as full_name:
        return _scattered([tensor], compression, full_name, op, *scales, process_set)[0]


@raising_tensorflows
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several tensors as one operation."""
    if not tensors:
        return tensors  # type: ignore[return-value]
    scales = prescale_factor, postscale_factor
    return _scattered(several(tensors), compression, None, op, *scales, process_set)


def _scattered(
    tensors: list[Tensor],
    compression: Any,
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: Any,
) -> list[Tensor]:
    small = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    inputs = [tensor for tensor, _ in small]
    group = group_of(process_set)
    outputs = gradients.reducescatter(inputs, name, op, prescale, postscale, group)
    return [
        compression.decompress(output, context)
        for output, (_, context) in zip(outputs, small, strict=True)
    ]

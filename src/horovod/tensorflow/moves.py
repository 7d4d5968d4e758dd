"""Horovod's verbs that move tensors without combining them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set, group_of
from horovod.tensorflow import gradients
from horovod.tensorflow.arguments import named, several
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.verbs import collectives

Tensor = Any


@raising_tensorflows
def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensor:
    """The ranks' tensors one after the other; the first dimension may differ."""
    with named("allgather", name) as full_name:
        return gradients.allgather([tensor], full_name, group_of(process_set))[0]


@raising_tensorflows
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[Tensor]:
    """``allgather`` of several tensors as one operation."""
    if not tensors:
        return tensors  # type: ignore[return-value]
    with named("grouped_allgather", name) as full_name:
        return gradients.allgather(several(tensors), full_name, group_of(process_set))


@raising_tensorflows
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Tensor:
    """The tensor of ``root_rank``, a number in the world also with a process set."""
    with named("broadcast", name) as full_name:
        return gradients.broadcast(tensor, root_rank, full_name, group_of(process_set))


@raising_tensorflows
def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Send rows to every rank; return those received, with ``splits`` also their numbers, int32."""
    group = group_of(process_set)
    with named("alltoall", name) as full_name:
        if splits is not None and tf.executing_eagerly():
            splits = tf.convert_to_tensor(splits).numpy().tolist()
        tensor = tf.convert_to_tensor(tensor)
        result, received = collectives.alltoall(tensor, splits, full_name, group)
    return result if splits is None else (result, tf.cast(received, tf.int32))


@raising_tensorflows
def join() -> tf.Tensor:
    """Contribute zeros, without data, until all have joined; return who was last, int32."""
    return tf.cast(collectives.join(), tf.int32)

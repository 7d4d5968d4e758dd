"""Horovod's DistributedOptimizer: Kolovod's, with Horovod's order of arguments."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.arguments import check_adasum, groups_of
from horovod.common.basics import Adasum, Average
from horovod.common.process_sets import global_process_set, group_of
from horovod.tensorflow.compression import Compression
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.spec import is_elastic
from kolovod.tensorflow import DistributedOptimizer as _distributed
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.verbs import collectives


@raising_tensorflows
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make ``optimizer``, of tf.compat.v1.train or Keras, step with the gradients of all ranks.

    ``name`` and ``use_locking`` have no effect: the optimizer stays the object it is. Raises
    ValueError for arguments that cannot work, NotImplementedError for Adasum if the number of
    ranks is no power of two.
    """
    groups = groups_of(num_groups, groups)
    if op == Adasum and average_aggregated_gradients:
        raise FrontEndArgumentError(
            "op Adasum combines steps: average_aggregated_gradients is none"
        )
    is_legacy = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if op == Adasum and not is_legacy:
        raise FrontEndArgumentError("op Adasum is not possible with optimizers of Keras")
    options: dict[str, Any] = {
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "groups": groups,
        "scale_local_gradients": scale_local_gradients,
    }
    if not is_legacy:
        keras = importlib.import_module("horovod.tensorflow.keras")  # which takes seconds to import
        return keras.DistributedOptimizer(optimizer, process_set=process_set, **options)
    group = group_of(process_set)
    if not is_elastic():  # else each step asks how many there are
        check_adasum(op, group, collectives)
    return _distributed(optimizer, process_set=group, **options)

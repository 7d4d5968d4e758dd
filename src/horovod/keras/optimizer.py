"""Horovod's optimizers for Keras: Kolovod's, with Horovod's order of arguments.

Two modules of Horovod have a ``DistributedOptimizer``, with different arguments. Neither makes a
new object here: the optimizer that is given keeps its state.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.common.arguments import groups_of, layers_of
from horovod.common.basics import Average
from horovod.common.process_sets import global_process_set, group_of
from kolovod import keras as kv
from kolovod.keras import Compression
from kolovod.keras.framework_detection import chosen
from kolovod.keras.optimizer import InKeras2


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
) -> Any:
    """Make ``optimizer`` step with the gradients of all ranks; see kolovod.keras.

    ``name`` and the devices are of no use here, ``num_groups`` is an older name of ``groups``.
    Raises ValueError for arguments that cannot work, ops other than Average and Sum among them.
    """
    return PartialDistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups_of(num_groups, groups),
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """``DistributedOptimizer`` that leaves the gradients of ``local_layers`` to each rank.

    ``local_layers``: a layer or any iterable of them. Raises ValueError for what is none.
    """
    kind = chosen().layers.Layer
    distributed = kv.DistributedOptimizer(
        optimizer,
        compression,
        backward_passes_per_step,
        op,
        group_of(process_set),
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        local_sources=layers_of(local_layers, lambda layer: isinstance(layer, kind)),
        scale_local_gradients=scale_local_gradients,
    )
    if isinstance(distributed, InKeras2):  # tests of scripts look at its counter
        distributed._agg_helper = _helper(distributed)
    return distributed


def _helper(optimizer: InKeras2) -> Any:
    """Return the object by which Horovod's optimizer adds up several passes; None for one."""
    if optimizer._kolovod_passes is None:
        return None
    helpers = importlib.import_module("horovod.tensorflow.gradient_aggregation")
    return helpers.Aggregation(optimizer._kolovod_passes, optimizer.register_local_var)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A model from a file, with its optimizer distributed; see kolovod.keras.load_model.

    ``legacy_opts`` need not be said: Keras finds the optimizer that the file names.
    """
    return kv.load_model(filepath, custom_optimizers, custom_objects, compression=compression)

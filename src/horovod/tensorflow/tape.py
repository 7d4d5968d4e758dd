"""Horovod's DistributedGradientTape: Kolovod's, with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.arguments import groups_of, layers_of
from horovod.common.basics import Average
from horovod.common.process_sets import global_process_set, group_of
from horovod.tensorflow.compression import Compression
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.exchange import GradientExchange, adopt
from kolovod.tensorflow.tape import Distributed


class _DistributedGradientTape(Distributed):
    """The methods that these functions add to the class of the tape that they are given."""

    @raising_tensorflows
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Any:
        """The gradients of all ranks. Names play no part here: place in the graph does."""
        return super().gradient(target, sources, output_gradients)

    @raising_tensorflows
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[Any, Any]:
        """The gradients of this rank alone, and those of all ranks."""
        own = super(Distributed, self).gradient(target, sources, output_gradients)
        return own, self.combine(own, sources)


@raising_tensorflows
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Have ``gradtape.gradient`` return all ranks' gradients; see kolovod.tensorflow.

    Raises ValueError for arguments that cannot work.
    """
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, Distributed):
        raise FrontEndArgumentError(
            f"gradtape is a {type(gradtape).__name__}: give a tf.GradientTape, and wrap it once"
        )
    exchange = GradientExchange(
        compression,
        op,
        group_of(process_set),
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        scale_local_gradients=scale_local_gradients,
    )
    adopt(gradtape, _DistributedGradientTape, exchange)
    return gradtape


@raising_tensorflows
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape as ``DistributedGradientTape`` does, but leave ``local_layers`` to each rank.

    The weights of these layers are a rank's own. ``local_layers``: a Keras layer, or any iterable
    of them. Raises ValueError for what is none.
    """
    layers = layers_of(local_layers, lambda layer: hasattr(layer, "trainable_weights"))
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        tape.register_local_source(layer)
    return tape

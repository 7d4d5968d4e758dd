"""Horovod's name for the same outside of graphs."""

from __future__ import annotations

from typing import Any

from horovod.common.process_sets import global_process_set
from horovod.tensorflow.gradient_aggregation import Reduce, _Helper


class LocalGradientAggregationHelperEager(_Helper):
    """Works in graphs, too, as the other does here."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: Any = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        """See LocalGradientAggregationHelper."""
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )

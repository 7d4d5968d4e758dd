"""Horovod's name for the same outside of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """Works in graphs, too, as the other does here."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Any],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        local_gradients_scaling_factor: float = 1.0,
    ) -> None:
        """See LocalGradientAggregationHelper."""
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            local_gradients_scaling_factor=local_gradients_scaling_factor,
        )

"""Horovod's helper for adding up gradients of several passes: Kolovod's, by its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kolovod.tensorflow.aggregation import LocalAggregation
from kolovod.tensorflow.exchange import variable_of


class LocalGradientAggregationHelper:
    """Sums gradients; every ``backward_passes_per_step``-th time ``allreduce_func`` gets them."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Any],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: Any = None,
        local_gradients_scaling_factor: float = 1.0,
    ) -> None:
        """``allreduce_func(gradients, variables)`` returns the combined ones.

        ``rank`` and ``optimizer_type`` are of no use here. Raises ValueError.
        """
        self._allreduce = allreduce_func
        self._factor = local_gradients_scaling_factor
        self._local: set[int] = set()
        self._is_last: Any = None
        self._aggregation = LocalAggregation(
            backward_passes_per_step, self._combine, average_aggregated_gradients, sparse_as_dense
        )

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of ``var`` from the others; it is divided by the scaling factor."""
        self._local.add(id(variable_of(var)))

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """The combined gradients in the last pass, the sums so far before it."""
        results: list[Any]
        results, self._is_last = self._aggregation.add(grads, vars)
        return results

    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the closure in the last pass; otherwise only count the optimizer's iteration."""

        def count() -> tf.Tensor:
            iterations = getattr(optimizer, "iterations", None)
            if iterations is not None:
                iterations.assign_add(1)
            return tf.constant(False)

        def apply() -> tf.Tensor:
            apply_grads_closure()
            return tf.constant(True)

        return tf.cond(self._is_last, apply, count)

    def _combine(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        results = list(grads)
        shared = [i for i, v in enumerate(vars) if id(variable_of(v)) not in self._local]
        combined: Sequence[Any] = self._allreduce(
            [grads[i] for i in shared], [vars[i] for i in shared]
        )
        for i, gradient in zip(shared, combined, strict=True):
            results[i] = gradient
        for i in set(range(len(results))) - set(shared):
            results[i] = results[i] / self._factor
        return results

"""Horovod's helper for adding up gradients of several passes: Kolovod's, by its methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set, group_of
from kolovod.tensorflow.aggregation import LocalAggregation
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.exchange import divided, variable_of
from kolovod.tensorflow.verbs import collectives

Reduce = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


class Aggregation:
    """The common part of Horovod's helpers for graphs and for eager code; here, all of them."""

    def __init__(
        self, aggregation: LocalAggregation, register_local_var: Callable[[Any], None]
    ) -> None:
        """``aggregation``: what counts the passes and has the sums.

        ``register_local_var(var)``: keep the gradient of ``var`` from the others; it counts as a
        share of the ranks' mean.
        """
        self._aggregation = aggregation
        self.register_local_var = register_local_var
        self._is_last: tf.Tensor | None = None

    @property
    def backward_passes_per_step(self) -> int:
        """The number of passes that make one step."""
        return self._aggregation.passes

    @property
    def average_aggregated_gradients(self) -> bool:
        """True if sums are divided by the number of passes."""
        return self._aggregation.average

    @property
    def sparse_as_dense(self) -> bool:
        """True if sparse gradients are taken; they are summed with all their zeros."""
        return self._aggregation.sparse_as_dense

    @property
    def counter(self) -> tf.Variable:
        """The passes since the last step, an int32 scalar; 0 when it is time to step."""
        return self._aggregation.count

    @property
    def locally_aggregated_grads(self) -> list[tf.Variable]:
        """The sums so far, of the variables that have had a gradient, in that order."""
        return self._aggregation.sums

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

        is_last = tf.equal(self.counter, 0) if self._is_last is None else self._is_last
        self._is_last = None
        return tf.cond(is_last, apply, count)


class Helper(Aggregation):
    """A helper that somebody makes for gradients that Kolovod's optimizers do not see."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: Any = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        """``allreduce_func(gradients, variables)`` returns the combined ones. Raises ValueError."""
        self._reduce = allreduce_func
        self._local: set[int] = set()
        self.process_set, self.scale_local_gradients = process_set, scale_local_gradients
        aggregation = LocalAggregation(
            backward_passes_per_step, self._combine, average_aggregated_gradients, sparse_as_dense
        )
        super().__init__(aggregation, lambda var: self._local.add(id(variable_of(var))))

    def _combine(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        results = list(grads)
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        shared = [i for i in present if id(variable_of(vars[i])) not in self._local]
        combined = self._reduce([grads[i] for i in shared], [vars[i] for i in shared])
        for i, gradient in zip(shared, combined, strict=True):
            results[i] = gradient
        if self.scale_local_gradients:
            members = VerbsOfSet(collectives, group_of(self.process_set))
            for i in set(present) - set(shared):
                results[i] = divided(results[i], members)
        return results


class LocalGradientAggregationHelper(Helper):
    """Sums gradients; every ``backward_passes_per_step``-th time ``allreduce_func`` gets them."""

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Reduce,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: Any = None,
        process_set: Any = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        """``rank``, ``optimizer_type`` and ``name`` are of no use here. Raises ValueError."""
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )

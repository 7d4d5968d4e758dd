"""Adding up the gradients of several backward passes before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.spec import checked_passes
from kolovod.tensorflow.exchange import Gradient, variable_of

Combine = Callable[[Sequence[Gradient], Sequence[Any]], list[Gradient]]

_as_it_is = tf.autograph.experimental.do_not_convert


class LocalAggregation:
    """Sums of gradients, one for each source, and a count of passes; all are tf.Variables.

    So it works within a ``tf.function`` too, where every pass runs the same graph: which pass is
    the last is decided while it runs, by a count that is the same on all ranks.
    """

    def __init__(
        self, passes: int, combine: Combine, average: bool = False, sparse_as_dense: bool = False
    ) -> None:
        """``combine``: what sums of ``passes`` passes are given to; ``average`` divides them."""
        self.passes = checked_passes(passes)
        self._combine = combine
        self.average = average
        self.sparse_as_dense = sparse_as_dense
        self._sums: dict[int, tf.Variable] = {}
        self._sources: list[Any] = []  # keeps the ids above taken
        self._count: tf.Variable | None = None

    @property
    def count(self) -> tf.Variable:
        """The number of passes added since those that were sent: int32, a scalar."""
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, name="passes")
        return self._count

    @property
    def sums(self) -> list[tf.Variable]:
        """The sum for each source that has had a gradient, in the order of their first ones."""
        return list(self._sums.values())

    @_as_it_is  # type: ignore[untyped-decorator]
    def add(
        self, gradients: Sequence[Gradient], sources: Sequence[Any]
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Add one pass; return the gradients to step with, and whether to: a bool, scalar.

        In the last pass these are the sums combined over the ranks, before it the sums so far.
        Raises InvalidArgumentError for sparse gradients unless ``sparse_as_dense``.
        """
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = [self._sum_for(gradients[i], sources[i]) for i in present]
        count = self.count
        for i, total in zip(present, sums, strict=True):
            total.assign_add(tf.convert_to_tensor(gradients[i]))
        is_last = tf.equal(count.assign_add(1), self.passes)

        def send() -> list[tf.Tensor]:
            own = [total.read_value() for total in sums]
            if self.average:
                own = [total / tf.cast(self.passes, total.dtype) for total in own]
            combined = self._combine(own, [sources[i] for i in present])
            with tf.control_dependencies(own):
                count.assign(0)
                for total in sums:
                    total.assign(tf.zeros_like(total))
            return [tf.convert_to_tensor(gradient) for gradient in combined]

        def wait() -> list[tf.Tensor]:
            return [total.read_value() for total in sums]

        flat = tf.cond(is_last, send, wait) if present else []
        results: list[Gradient] = [None] * len(gradients)
        for i, gradient in zip(present, flat, strict=True):
            results[i] = gradient
        return results, is_last

    def _sum_for(self, gradient: Gradient, source: Any) -> tf.Variable:
        if isinstance(gradient, tf.IndexedSlices) and not self.sparse_as_dense:
            raise FrontEndArgumentError(
                "backward_passes_per_step above 1 needs dense gradients, but that of a variable of "
                f"shape {tuple(source.shape)} is sparse: give sparse_as_dense=True"
            )
        key = id(variable_of(source))
        if key not in self._sums:
            with tf.init_scope():
                zeros = tf.zeros(source.shape, gradient.dtype)
                self._sums[key] = tf.Variable(zeros, trainable=False, name="sum_of_gradients")
            self._sources.append(source)
        return self._sums[key]

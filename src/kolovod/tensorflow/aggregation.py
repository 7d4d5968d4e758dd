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

        In the last pass these are the sums combined over the ranks, before it the sums so far; None
        for a source that has had a gradient in none of the passes. All ranks give the same sources.
        Raises InvalidArgumentError for sparse gradients unless ``sparse_as_dense``.
        """
        present = [(g, s) for g, s in zip(gradients, sources, strict=True) if g is not None]
        to_add = [(self._sum_for(gradient, source), gradient) for gradient, source in present]
        for total, gradient in to_add:  # after all were looked at: one may be refused
            total.assign_add(tf.convert_to_tensor(gradient))
        sums = [self._sums.get(id(variable_of(source))) for source in sources]
        count = self.count
        is_last = tf.equal(count.assign_add(1), self.passes)

        def wait() -> list[Gradient]:
            return [None if total is None else total.read_value() for total in sums]

        def send() -> list[Gradient]:
            own = wait()
            if self.average:
                own = [g if g is None else g / tf.cast(self.passes, g.dtype) for g in own]
            combined = self._combine(own, sources)
            with tf.control_dependencies([each for each in own if each is not None]):
                count.assign(0)
                for total in sums:
                    if total is not None:
                        total.assign(tf.zeros_like(total))
            return [g if g is None else tf.convert_to_tensor(g) for g in combined]

        if tf.executing_eagerly():
            return (send() if is_last else wait()), is_last
        known = [i for i, total in enumerate(sums) if total is not None]
        flat = iter(
            tf.cond(
                is_last,
                lambda: [combined for combined in send() if combined is not None],
                lambda: [total for total in wait() if total is not None],
            )
        )
        return [next(flat) if i in known else None for i in range(len(sums))], is_last

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

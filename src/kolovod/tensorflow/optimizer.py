"""DistributedOptimizer: optimizers of Keras and of TensorFlow 1, stepping with all gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.ops import Adasum, Average
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.spec import checked_passes
from kolovod.tensorflow import graph
from kolovod.tensorflow.aggregation import LocalAggregation
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.exchange import GradientExchange, adopt


class Distributed(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """The methods that ``DistributedOptimizer`` adds to a tf.compat.v1.train.Optimizer's class."""

    _kolovod_exchange: GradientExchange
    _kolovod_aggregation: LocalAggregation | None
    _kolovod_is_last: tf.Tensor | None

    @raising_tensorflows
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients, as every optimizer does, and combine them over the ranks.

        With ``backward_passes_per_step`` these are this rank's sums until the last pass. Raises
        MismatchError (in a ``tf.function`` tf.errors.FailedPreconditionError) on every rank when
        ranks have other variables.
        """
        is_plain = self._kolovod_aggregation is None and self._kolovod_exchange.spec.op != Adasum
        if graph.is_of_session() and not is_plain:
            raise FrontEndArgumentError(
                "backward_passes_per_step above 1 and op Adasum need TensorFlow 2: use tf.function "
                "instead of a session"
            )
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if self._kolovod_aggregation is not None:
            gradients, self._kolovod_is_last = self._kolovod_aggregation.add(gradients, variables)
        elif self._kolovod_exchange.spec.op != Adasum:
            gradients = self._kolovod_exchange(gradients, variables)
        return list(zip(gradients, variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of ``var`` to this rank alone; see ``local_sources``."""
        self._kolovod_exchange.add_local(var)

    @raising_tensorflows
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: Any = None
    ) -> Any:
        """Apply gradients; with ``backward_passes_per_step`` do nothing until the last pass."""
        pairs = list(grads_and_vars)
        is_last, self._kolovod_is_last = self._kolovod_is_last, None

        def apply() -> Any:
            if self._kolovod_exchange.spec.op == Adasum:
                return self._kolovod_step_by_adasum(pairs, global_step, name)
            return super(Distributed, self).apply_gradients(pairs, global_step, name)

        if is_last is None:
            return apply()

        def step() -> tf.Tensor:
            done = apply()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        return tf.cond(is_last, step, lambda: tf.constant(False))

    def _kolovod_step_by_adasum(self, pairs: list[tuple[Any, Any]], *args: Any) -> None:
        """Step as this rank alone would, combine the ranks' steps, and add them to the start."""
        variables = [variable for gradient, variable in pairs if gradient is not None]
        with tf.control_dependencies(self._kolovod_pairs_of_ranks()):
            starts = [tf.identity(variable) for variable in variables]
        with tf.control_dependencies(starts):
            super().apply_gradients(pairs, *args)
        own = [variable - start for variable, start in zip(variables, starts, strict=True)]
        steps = self._kolovod_exchange(own, variables)
        for variable, start, step in zip(variables, starts, steps, strict=True):
            variable.assign(start + step)

    def _kolovod_pairs_of_ranks(self) -> list[Any]:
        """Fail, before any variable has changed, for a number of ranks that Adasum cannot do."""
        exchange = self._kolovod_exchange
        if not exchange.is_member:
            return []
        size = tf.convert_to_tensor(VerbsOfSet(exchange.verbs, exchange.spec.process_set).size())
        check = tf.debugging.assert_equal(
            tf.bitwise.bitwise_and(size, size - 1),
            0,
            "op Adasum: the number of ranks is not a power of two; use Average",
        )
        return [] if check is None else [check]


@raising_tensorflows
def DistributedOptimizer(
    optimizer: Any,
    compression: AnyCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    process_set: ProcessSet | None = None,
    *,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Iterable[Any]] | None = None,
    sparse_as_dense: bool = False,
    local_sources: Iterable[Any] = (),
    scale_local_gradients: bool = True,
) -> Any:
    """Have ``optimizer`` step with all ranks' gradients combined, and return it.

    ``optimizer``: one of Keras (see kolovod.keras, which this forwards to), or a
    tf.compat.v1.train.Optimizer with ``minimize``, or ``compute_gradients`` and
    ``apply_gradients``, in a ``tf.function`` or outside. It stays the object it was.

    ``backward_passes_per_step``: gradients of so many passes are summed here, in tf.Variables,
    before they are sent; passes before the last one change nothing.
    ``average_aggregated_gradients``: divide these sums by the number of passes.
    ``op``: Average or Sum. Adasum (not with Keras): every rank steps by itself, and the steps are
    combined.
    Other arguments are those of ``DistributedGradientTape``.

    Raises InvalidArgumentError for arguments that cannot work.
    """
    passes = checked_passes(backward_passes_per_step)
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from kolovod.keras import DistributedOptimizer as of_keras  # takes seconds to import

        return of_keras(
            optimizer,
            compression,
            passes,
            op,
            process_set,
            average_aggregated_gradients=average_aggregated_gradients,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            local_sources=tuple(local_sources),
            scale_local_gradients=scale_local_gradients,
        )
    if isinstance(optimizer, Distributed):
        raise FrontEndArgumentError("this optimizer is already distributed; wrap it once")
    exchange = GradientExchange(
        compression,
        op,
        process_set,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        local_sources=local_sources,
        scale_local_gradients=scale_local_gradients,
    )
    aggregation = None
    if passes > 1:
        combine = _as_they_are if op == Adasum else exchange
        aggregation = LocalAggregation(
            passes, combine, average_aggregated_gradients, sparse_as_dense
        )
    adopt(optimizer, Distributed, exchange)
    optimizer._kolovod_aggregation = aggregation
    optimizer._kolovod_is_last = None
    return optimizer


def _as_they_are(gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    return list(gradients)

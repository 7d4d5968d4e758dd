"""Batch normalisation over the batches of all ranks, as a layer of Keras.

Means and variances are those of all ranks' samples together, each rank weighted by how many it has
(Chan, Golub and LeVeque, 1979, for adding up sums of squared deviations without cancellation).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from kolovod.core.ops import Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.submission import no_process_set
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow.verbs import TensorflowCollectives, collectives

_as_it_is = tf.autograph.experimental.do_not_convert


@tf.keras.utils.register_keras_serializable("kolovod")
class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """tf.keras.layers.BatchNormalization whose batch is that of all ranks.

    In inference, or while ``trainable`` is False, it is plain batch normalisation. All ranks must
    call it equally often, in forward and in backward; a rank may have no samples.
    """

    def __init__(self, axis: int = -1, *, process_set: ProcessSet | None = None, **options: Any):
        """``process_set``: its members normalise together, other ranks alone; it is not saved.

        Other arguments are those of tf.keras.layers.BatchNormalization.
        """
        super().__init__(axis=axis, **options)
        if process_set is not None and not isinstance(process_set, ProcessSet):
            raise no_process_set(process_set)
        self.process_set = process_set

    @_as_it_is  # type: ignore[untyped-decorator]
    def call(self, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> tf.Tensor:
        """Normalise ``inputs``; where ``mask`` is False they do not count."""
        if tf.is_tensor(training):
            training = tf.get_static_value(training)
            if training is None:
                raise FrontEndArgumentError("training is a tensor of a graph: give True or False")
        if not training or not self.trainable:
            return super().call(inputs, training=False)
        inputs = tf.convert_to_tensor(inputs)
        wide = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        axes = self.axis if isinstance(self.axis, list | tuple) else [self.axis]
        kept = {axis % inputs.shape.rank for axis in axes}
        is_member = self.process_set is None or self.process_set.included()
        normalisation = _Normalisation(
            [d for d in range(inputs.shape.rank) if d not in kept],
            self.epsilon,
            collectives if is_member else None,
            self.process_set,
        )
        weights = None if mask is None else _weights(mask, inputs, kept, wide)
        normal, mean, variance, count = _normalised(tf.cast(inputs, wide), weights, normalisation)
        self._track(mean, variance, count)
        shape = tf.shape(mean)
        if self.scale:
            normal *= tf.reshape(tf.cast(self.gamma, wide), shape)
        if self.center:
            normal += tf.reshape(tf.cast(self.beta, wide), shape)
        return tf.cast(normal, inputs.dtype)

    def _track(self, mean: tf.Tensor, variance: tf.Tensor, count: tf.Tensor) -> None:
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            old = tf.convert_to_tensor(moving)
            new = tf.cast(tf.reshape(new, tf.shape(old)), old.dtype)
            moved = old * self.momentum + new * (1.0 - self.momentum)
            moving.assign(tf.where(count > 0, moved, old))


class _Normalisation(NamedTuple):
    """The axes that are normalised, and the ranks with which this is done."""

    reduced: list[int]
    epsilon: float
    verbs: TensorflowCollectives | None
    process_set: ProcessSet | None


def _weights(mask: Any, inputs: tf.Tensor, kept: set[int], dtype: tf.DType) -> tf.Tensor:
    """1 for what counts and 0 for what does not, of the inputs' shape but for kept dimensions."""
    weights = tf.cast(mask, dtype)
    for _ in range(inputs.shape.rank - weights.shape.rank):
        weights = weights[..., None]
    sizes = [1 if d in kept else size for d, size in enumerate(tf.unstack(tf.shape(inputs)))]
    return tf.broadcast_to(weights, sizes)


def _normalised(
    x: tf.Tensor, weights: tf.Tensor | None, normalisation: _Normalisation
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` normalised; mean and variance of all ranks' samples (kept dimensions), their count."""
    reduced, epsilon, verbs, process_set = normalisation

    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values if weights is None else weights * values, reduced, True)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def forward(x: tf.Tensor) -> Any:
        if weights is None:
            count = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), reduced)), x.dtype)
        else:
            count = tf.reduce_sum(weights)
        own_mean = tf.math.divide_no_nan(total(x), count)
        shape = tf.shape(own_mean)
        squares = total(tf.math.square(x - own_mean))
        parts = [count[None], tf.reshape(own_mean, [-1]), tf.reshape(squares, [-1])]
        everything = tf.concat(parts, 0)[None]
        if verbs is not None:
            everything = verbs.allgather(everything, process_set=process_set)
        features = tf.size(own_mean)
        counts, means, sums = tf.split(everything, [1, features, features], 1)
        count = tf.reduce_sum(counts)
        flat_mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
        between = tf.reduce_sum(counts * tf.math.square(means - flat_mean), 0)
        flat_variance = tf.math.divide_no_nan(tf.reduce_sum(sums, 0) + between, count)
        mean, variance = tf.reshape(flat_mean, shape), tf.reshape(flat_variance, shape)
        scale = tf.math.rsqrt(variance + epsilon)
        normal = (x - mean) * scale

        def backward(grad: tf.Tensor, *_: Any) -> tf.Tensor:
            sums = [tf.reduce_sum(grad, reduced, True), tf.reduce_sum(grad * normal, reduced, True)]
            both = tf.stack(sums)
            if verbs is not None:
                both = verbs.allreduce(both, None, Sum, process_set=process_set)
            mean_grad, mean_product = tf.unstack(tf.math.divide_no_nan(both, count))
            common = mean_grad + normal * mean_product
            return (grad - (common if weights is None else weights * common)) * scale

        return (normal, mean, variance, count), backward

    normal, *facts = forward(x)
    mean, variance, count = map(tf.stop_gradient, facts)
    return normal, mean, variance, count

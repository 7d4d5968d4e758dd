"""Gradients of Keras on TensorFlow: ops of a graph, or eager tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from kolovod.core.codecs import Codec
from kolovod.core.submission import Group
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.alike import ELEMENTS, place_of_bad
from kolovod.gradients.compression import Compressor, Payload
from kolovod.gradients.compression.compressor import Verb
from kolovod.gradients.spec import ReduceSpec
from kolovod.private_apis.tensorflow import is_for_xla
from kolovod.tensorflow import alike, repeated
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.verbs import collectives

tell_where = alike.tell_where
T = TypeVar("T")

varies = False
"""Whether a variable may have a gradient in one step and none in the next."""


class _Slices(Compressor):
    """Sends values and indices; a row that several ranks have comes back several times."""

    keeps_state = False

    def compress(self, key: str, tensor: tf.IndexedSlices) -> Payload:
        """Send both, by an allgather."""
        return Payload((tensor.values, tensor.indices), "allgather", tensor.dense_shape)

    def decompress(
        self, key: str, payload: Payload, received: Sequence[tf.Tensor]
    ) -> tf.IndexedSlices:
        """All ranks' slices as one."""
        values, indices = received
        return tf.IndexedSlices(values, indices, payload.context)


SPARSE = _Slices()
"""Sends what ``is_sparse``."""


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def start(
    spec: ReduceSpec, verb: Verb, name: str, tensors: list[tf.Tensor], codecs: Sequence[Codec]
) -> Callable[[], Sequence[tf.Tensor]]:
    """Reduce or gather ``tensors`` as one group; return what waits for the results.

    In a graph they are the outputs of an op, which is known by its place in the graph: the op may
    be there several times. The scope keeps that place free of Keras's names, which count how many
    optimizers the process has made.
    """
    if tf.executing_eagerly():
        return exchange.by(collectives, spec)(verb, name, tensors, codecs)
    _refuse_xla()
    with tf.name_scope(f"kolovod_{name.replace('.', '_')}/"):
        return exchange.by(collectives, spec, at_once=True)(verb, "", tensors, codecs)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def run_in_transaction(
    combine: Callable[[Sequence[Any]], Sequence[Any]], grads: Sequence[Any], *, counts: bool
) -> list[Any]:
    """``combine(grads)`` as a step of an elastic job; see ``elastic.exactly``."""
    if not tf.executing_eagerly():
        _refuse_xla()
    results: list[Any] = repeated.run_in_transaction(combine, grads, counts=counts)
    return results


def run_alone(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, which is part of a program."""
    return function(*args)


def together(tensors: Sequence[Any], process_set: Group | None) -> list[Any]:
    """``tensors`` of several groups."""
    return list(tensors)


def is_traced(grads: Sequence[Any]) -> bool:
    """Return whether ``grads`` stand for those of a program that is being made."""
    return not tf.executing_eagerly()


def is_sparse(grad: Any) -> bool:
    """Return whether ``grad`` has indices and values, which are gathered."""
    return isinstance(grad, tf.IndexedSlices)


def current_graph() -> tf.Graph | None:
    """The graph that is being built, or None outside of graphs."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def is_within(outer: tf.Graph | None) -> bool:
    """Return whether tensors of the graph ``outer`` can be used here: in its branches, too."""
    here = current_graph()
    while here is not outer and here is not None and outer is not None:
        here = getattr(here, "outer_graph", None)
    return here is outer


def either(
    condition: tf.Tensor, do: Callable[[], Any], otherwise: Callable[[], Any], result: tf.Variable
) -> tf.Tensor:
    """Return ``result`` as it is after ``do()``, if ``condition``, else after ``otherwise()``."""

    def after(work: Callable[[], Any]) -> tf.Tensor:
        work()
        return tf.identity(result)

    return tf.cond(condition, lambda: after(do), lambda: after(otherwise))


def dense(grad: Any) -> tf.Tensor:
    """Return ``grad`` without gaps."""
    return tf.convert_to_tensor(grad)


def share(size: int, process_set: Group | None) -> Any:
    """The share of one of ``size`` ranks; in a graph, of the world in which it runs, as float64."""
    if tf.executing_eagerly():
        return 1.0 / size
    return 1.0 / tf.cast(VerbsOfSet(collectives, process_set).size(), tf.float64)


def scaled(grad: Any, factor: Any) -> Any:
    """``factor`` times ``grad``."""
    return tf.math.scalar_mul(tf.cast(factor, grad.dtype), grad)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def facts(
    count: Any,
    rate: Any,
    variables: Sequence[Any],
    every: int,
    grads: Sequence[Any],
    process_set: Group | None,
) -> tf.Tensor:
    """Return a table with the facts of ``alike``: four numbers, in this rank's row.

    The last one tells which of ``grads`` is not finite.
    """
    count = tf.cast(tf.convert_to_tensor(count), tf.int32)
    rate = tf.bitcast(tf.cast(tf.convert_to_tensor(rate), tf.float32), tf.int32)

    def bits() -> tf.Tensor:
        total = tf.zeros((), tf.int32)
        for variable in variables:
            value = tf.convert_to_tensor(variable)
            if value.dtype.size >= 2:
                words = tf.bitcast(value, tf.int16 if value.dtype.size == 2 else tf.int32)
                total = total * 31 + tf.reduce_sum(tf.cast(words, tf.int32))
        return total

    is_due = tf.equal(count % every, 0)
    total = tf.cond(is_due, bits, lambda: tf.zeros((), tf.int32))
    place = VerbsOfSet(collectives, process_set)
    own_row = tf.one_hot(place.rank(), place.size(), dtype=tf.int32)
    bad = tf.zeros((), tf.int32)
    for i, grad in reversed(list(enumerate(grads))):
        if grad.dtype.is_floating:
            is_finite = tf.reduce_all(tf.math.is_finite(tf.reshape(grad, [-1])[:ELEMENTS]))
            bad = tf.where(is_finite, bad, place_of_bad(i + 1, place.size(), place.rank()))
    return own_row[:, None] * tf.stack([count + 1, rate, total, bad])


def in_last_pass(
    optimizer: Any, reduced: Callable[[list[Any]], list[Any]], grads: list[Any]
) -> list[Any]:
    """Return ``reduced(grads)``: Keras asks for it in the last of several passes only."""
    return reduced(grads)


def _refuse_xla() -> None:
    """Raise InvalidArgumentError within XLA, which would say later that it lacks the op."""
    if is_for_xla():
        raise FrontEndArgumentError(
            "XLA on TensorFlow cannot wait for other ranks: give jit_compile=False to "
            "model.compile() or tf.function()"
        )

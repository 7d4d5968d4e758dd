"""The gradients of the verbs in TensorFlow, eager or in a graph (kolovod/core/derivatives.py).

``tf.custom_gradient`` uses them (verbs.py). They are also registered for the ops, for graphs that
were not built by it here: such as those that were imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kolovod.core.derivatives import Given, backward_request, finish
from kolovod.core.ops import Average
from kolovod.core.submission import Request
from kolovod.core.verbs import ALLGATHER, ALLTOALL, VERBS, Then
from kolovod.tensorflow import graph

Tensors = Sequence[tf.Tensor]


class Verbs(Protocol):
    """The verbs on one process set that gradients consist of."""

    def run(self, request: Request, tensors: Tensors) -> list[tf.Tensor]:
        """Carry out ``request`` on ``tensors`` as one group."""
        ...

    def rank(self) -> Any:
        """The place of this rank in the set: a number, or a tensor of one."""
        ...

    def size(self) -> Any:
        """Return the number of ranks in the set."""
        ...


class Arithmetic:
    """The arithmetic that derivatives need of TensorFlow (derivatives.Arithmetic)."""

    @staticmethod
    def zero_unless(rank: Any, root: int, tensor: tf.Tensor) -> tf.Tensor:
        """Return ``tensor`` if ``rank`` is ``root``, else zeros like it."""
        return tf.where(tf.equal(rank, root), tensor, tf.zeros_like(tensor))

    @staticmethod
    def rows(tensor: tf.Tensor, start: Any, count: Any) -> tf.Tensor:
        """Return ``count`` rows of ``tensor``, from row ``start`` on."""
        return tensor[start : start + tf.cast(count, tf.int64)]

    @staticmethod
    def padded(tensor: tf.Tensor, rows: Any) -> tf.Tensor:
        """Return ``tensor`` with zeros behind it, so that it has so many ``rows``."""
        missing = tf.concat([[rows - tf.shape(tensor)[0]], tf.shape(tensor)[1:]], 0)
        return tf.concat([tensor, tf.zeros(missing, tensor.dtype)], 0)

    @staticmethod
    def scaled(tensor: tf.Tensor, factor: float, divisor: Any) -> tf.Tensor:
        """Return ``tensor * factor``, divided by the ``divisor``; None or 1: there is none."""
        if factor != 1.0:
            tensor = tensor * tf.constant(factor, tensor.dtype)  # tf.cast would round to float32
        if divisor is None:
            return tensor
        return tensor / tf.cast(divisor, tensor.dtype)


def of_verb(
    verbs: Verbs,
    request: Request,
    rows: Sequence[Any],
    starts: Sequence[Any],
    received: Any,
    upstream: Tensors,
) -> list[tf.Tensor]:
    """The gradients of ``request``; see derivatives.Given for ``rows`` and what follows."""
    results = verbs.run(backward_request(request, received), upstream)
    adjoint = request.verb.adjoint
    assert adjoint is not None
    # In a graph rank and size are ops, which are made only where they are needed.
    rank = verbs.rank() if adjoint.then is Then.ZERO_UNLESS_ROOT else None
    size = verbs.size() if adjoint.then is Then.SCALE and request.op == Average else None
    return finish(request, Given(rank, size, rows, starts, received), results, Arithmetic())


def of_group(
    outputs: Tensors,
    upstream: Sequence[tf.Tensor | None],
    formula: Callable[[list[int], list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor | None]:
    """The gradients of a group by ``formula(places, upstream)``, of those that can have one.

    Which these are is the same on all ranks: an output that nothing depends on has zeros.
    """
    places = [
        i for i, output in enumerate(outputs) if output.dtype.is_floating or output.dtype.is_complex
    ]
    given = [
        tf.zeros_like(outputs[i]) if upstream[i] is None else tf.convert_to_tensor(upstream[i])
        for i in places
    ]
    gradients: list[tf.Tensor | None] = [None] * len(outputs)
    for i, gradient in zip(places, formula(places, given) if places else [], strict=True):
        gradients[i] = gradient
    return gradients


def scaled(
    tensor: tf.Tensor, op: int, scales: tuple[float, float], verbs: Verbs | None
) -> tf.Tensor:
    """``tensor`` with both factors, and divided by the number of ranks if ``op`` is Average."""
    divisor = verbs.size() if op == Average and verbs is not None else None
    return Arithmetic.scaled(tensor, scales[0] * scales[1], divisor)


def rows_of(tensor: tf.Tensor) -> Any:
    """The first dimension: a number if it is known. 0 for a scalar, which no verb splits."""
    if tensor.shape.rank == 0:
        return 0
    known = tensor.shape[0] if tensor.shape.rank else None
    return tf.shape(tensor)[0] if known is None else known


# Of the ops ---------------------------------------------------------------------------------------


class _GraphVerbs:
    """The ops themselves, on the process set of a node."""

    def __init__(self, node: tf.Operation) -> None:
        self._set = node.get_attr("process_set")

    def run(self, request: Request, tensors: Tensors) -> list[tf.Tensor]:
        return graph.run(request, tensors, self._set)[0]

    def rank(self) -> tf.Tensor:
        return graph.fact("rank", self._set)

    def size(self) -> tf.Tensor:
        return graph.fact("size", self._set)


def _of_node(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    """The gradients of an op of ours; none of the anchor, and of splits."""
    request, inputs = graph.request_of(node), list(node.inputs)[1:]
    has_rows = request.verb in (ALLGATHER, ALLTOALL)
    outputs = node.outputs[:-1] if has_rows else node.outputs

    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        rows = [rows_of(inputs[i]) for i in places]
        starts = [node.outputs[-1][i] for i in places] if request.verb is ALLGATHER else []
        received = node.outputs[-1] if request.verb is ALLTOALL else None
        return of_verb(_GraphVerbs(node), request, rows, starts, received, given)

    found = of_group(outputs, upstream[: len(outputs)], formula)
    return [None, *found, *([None] if request.verb is ALLTOALL else [])]


def _register(op_type: str) -> None:
    def run(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
        with graph.anchored(None if graph.is_of_session() else node.inputs[0]):
            return _of_node(node, *upstream)

    tf.RegisterGradient(op_type)(run)


for _verb in VERBS.values():
    if _verb.adjoint is not None:
        _register(f"Kolovod{_verb.name.capitalize()}")
for _type in ("KolovodBarrier", "KolovodJoin", "KolovodFact"):
    tf.no_gradient(_type)

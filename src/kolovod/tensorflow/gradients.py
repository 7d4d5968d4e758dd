"""The gradients of the verbs, in terms of other verbs; eager or in a graph.

The gradient is that of the *sum of all ranks' losses* with respect to this rank's input, as for
PyTorch: what reached the output on every rank is added up and goes back the way it came. So the
gradient of an Average is an Average, that of a Sum a Sum.

``tf.custom_gradient`` uses them (verbs.py). They are also registered for the ops, for graphs that
were not built by it here: such as those that were imported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kolovod.core.ops import Average, Op, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.tensorflow import graph

Tensors = Sequence[tf.Tensor]
Gradient = Callable[..., list[tf.Tensor | None]]


class Verbs(Protocol):
    """The verbs on one process set that gradients consist of."""

    def allreduce(
        self, tensors: Tensors, name: str | None, op: int, scales: tuple[float, float]
    ) -> list[tf.Tensor]:
        """As one group."""
        ...

    def allgather(self, tensors: Tensors, name: str | None) -> list[tf.Tensor]:
        """As one group."""
        ...

    def alltoall(self, tensor: tf.Tensor, splits: Any, name: str | None) -> tf.Tensor:
        """The rows received."""
        ...

    def rank(self) -> Any:
        """The place of this rank in the set: a number, or a tensor of one."""
        ...

    def size(self) -> Any:
        """How many ranks are in the set."""
        ...


def of_allreduce(
    verbs: Verbs, name: str | None, op: int, scales: tuple[float, float], upstream: Tensors
) -> list[tf.Tensor]:
    """The same reduction of the gradients."""
    _need_linear("allreduce", op)
    return verbs.allreduce(upstream, _backward(name), op, scales)


def of_broadcast(verbs: Verbs, name: str | None, root: int, upstream: Tensors) -> list[tf.Tensor]:
    """The sum of the gradients on the root, zeros elsewhere."""
    totals = verbs.allreduce(upstream, _backward(name), Sum, (1.0, 1.0))
    is_root = tf.equal(verbs.rank(), root)
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in totals]


def of_allgather(
    verbs: Verbs,
    name: str | None,
    starts: Sequence[Any],
    rows: Sequence[Any],
    upstream: Tensors,
) -> list[tf.Tensor]:
    """Of the summed gradients the ``rows`` of this rank, from the row where they start."""
    totals = verbs.allreduce(upstream, _backward(name), Sum, (1.0, 1.0))
    return [
        total[start : start + tf.cast(count, tf.int64)]
        for total, start, count in zip(totals, starts, rows, strict=True)
    ]


def of_alltoall(
    verbs: Verbs, name: str | None, received: Any, rows: Any, upstream: tf.Tensor
) -> tf.Tensor:
    """What was received goes back; of the ``rows`` of the input, those that stayed get zeros."""
    sent = verbs.alltoall(upstream, received, _backward(name))
    kept = tf.concat([[rows - tf.shape(sent)[0]], tf.shape(sent)[1:]], 0)
    return tf.concat([sent, tf.zeros(kept, sent.dtype)], 0)


def of_reducescatter(
    verbs: Verbs, name: str | None, op: int, scales: tuple[float, float], upstream: Tensors
) -> list[tf.Tensor]:
    """All ranks' gradients, one after the other, with the factors of the sum."""
    _need_linear("reducescatter", op)
    gathered = verbs.allgather(upstream, _backward(name))
    return [scaled(gradient, op, scales, verbs) for gradient in gathered]


def of_group(
    outputs: Tensors,
    upstream: Sequence[tf.Tensor | None],
    formula: Callable[[list[int], list[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor | None]:
    """The gradients of a group by ``formula(places, upstream)``, of those that can have one.

    Which these are is the same on all ranks: an output that nothing depends on has zeros.
    """
    places = [i for i, output in enumerate(outputs) if output.dtype.is_floating]
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
    factor = scales[0] * scales[1]
    if factor != 1.0:
        tensor = tensor * tf.constant(factor, tensor.dtype)  # tf.cast would round to float32
    if op == Average and verbs is not None:
        tensor = tensor / tf.cast(verbs.size(), tensor.dtype)
    return tensor


def rows_of(tensor: tf.Tensor) -> Any:
    """The first dimension: a number if it is known. 0 for a scalar, which no verb splits."""
    if tensor.shape.rank == 0:
        return 0
    known = tensor.shape[0] if tensor.shape.rank else None
    return tf.shape(tensor)[0] if known is None else known


def _backward(name: str | None) -> str | None:
    return f"{name}.backward" if name else None


def _need_linear(verb: str, op: int) -> None:
    if op not in (Average, Sum):
        raise InvalidArgumentError(
            f"{verb} with op {Op(op).name} has no gradient here; use Average or Sum"
        )


# Of the ops ---------------------------------------------------------------------------------------


class _GraphVerbs:
    """The ops themselves, on the process set of a node."""

    def __init__(self, node: tf.Operation) -> None:
        self._set = node.get_attr("process_set")

    def allreduce(
        self, tensors: Tensors, name: str | None, op: int, scales: tuple[float, float]
    ) -> list[tf.Tensor]:
        return graph.allreduce(tensors, name, op, scales, self._set)

    def allgather(self, tensors: Tensors, name: str | None) -> list[tf.Tensor]:
        return graph.allgather(tensors, name, self._set)[0]

    def alltoall(self, tensor: tf.Tensor, splits: Any, name: str | None) -> tf.Tensor:
        return graph.alltoall(tensor, splits, name, self._set)[0]

    def rank(self) -> tf.Tensor:
        return graph.fact("rank", self._set)

    def size(self) -> tf.Tensor:
        return graph.fact("size", self._set)


def _name(node: tf.Operation) -> str:
    name: str = node.get_attr("tensor_name").decode()
    return name


def _scales(node: tf.Operation) -> tuple[float, float]:
    bits = struct.pack("<qq", node.get_attr("prescale_bits"), node.get_attr("postscale_bits"))
    prescale, postscale = struct.unpack("<dd", bits)
    return prescale, postscale


def _tensors(node: tf.Operation) -> Tensors:
    return list(node.inputs)[1:]  # without the anchor


def _registered(op_type: str) -> Callable[[Gradient], Gradient]:
    """For a function of a node and what reaches its outputs."""

    def register(gradient: Gradient) -> Gradient:
        def run(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
            with graph.anchored(None if graph.is_of_session() else node.inputs[0]):
                return gradient(node, *upstream)

        tf.RegisterGradient(op_type)(run)
        return gradient

    return register


@_registered("KolovodAllreduce")
def _allreduce(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        op = node.get_attr("op")
        return of_allreduce(_GraphVerbs(node), _name(node), op, _scales(node), given)

    return [None, *of_group(node.outputs, upstream, formula)]


@_registered("KolovodBroadcast")
def _broadcast(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        return of_broadcast(_GraphVerbs(node), _name(node), node.get_attr("root"), given)

    return [None, *of_group(node.outputs, upstream, formula)]


@_registered("KolovodAllgather")
def _allgather(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        rows = [rows_of(_tensors(node)[i]) for i in places]
        starts = [node.outputs[-1][i] for i in places]
        return of_allgather(_GraphVerbs(node), _name(node), starts, rows, given)

    return [None, *of_group(node.outputs[:-1], upstream[:-1], formula)]


@_registered("KolovodAlltoall")
def _alltoall(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        rows, received = rows_of(_tensors(node)[0]), node.outputs[1]
        return [of_alltoall(_GraphVerbs(node), _name(node), received, rows, given[0])]

    return [None, *of_group(node.outputs[:1], upstream[:1], formula), None]


@_registered("KolovodReducescatter")
def _reducescatter(node: tf.Operation, *upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
    def formula(places: list[int], given: list[tf.Tensor]) -> list[tf.Tensor]:
        op = node.get_attr("op")
        return of_reducescatter(_GraphVerbs(node), _name(node), op, _scales(node), given)

    return [None, *of_group(node.outputs, upstream, formula)]


for _type in ("KolovodBarrier", "KolovodJoin", "KolovodFact"):
    tf.no_gradient(_type)

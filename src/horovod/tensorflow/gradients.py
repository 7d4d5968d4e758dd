"""The verbs with Horovod's gradients, on eager tensors and in graphs.

They are those of the *mean* of the ranks' losses where Kolovod's are of their sum (broadcast,
allgather; for reducescatter they are multiplied by the number of ranks), and Min, Max and Product
hand the gradient through the same operation. Scripts have been tuned with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.ops import Average, Sum
from kolovod.tensorflow.differentiable import VerbsOfSet, backward
from kolovod.tensorflow.gradients import scaled
from kolovod.tensorflow.verbs import collectives

Tensor = Any
Tensors = Sequence[Any]


def allreduce(tensors: Tensors, name: str | None, *arguments: Any) -> list[Tensor]:
    """Combine ``tensors``. ``arguments``: op, prescale, postscale, process set, codec."""
    if arguments[0] in (Average, Sum):
        return collectives.grouped_allreduce(list(tensors), name, *arguments)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*inputs: Tensor) -> Any:
        def gradient(*grads: Tensor) -> list[Tensor]:
            return collectives.grouped_allreduce(list(grads), None, *arguments)

        results = collectives.grouped_allreduce(list(inputs), name, *arguments)
        return results, backward(gradient)

    return list(reduced(*tensors))


def allgather(tensors: Tensors, name: str | None, group: Any) -> list[Tensor]:
    """Gather ``tensors``; each rank gets the mean gradient of its own rows."""
    return collectives.grouped_allgather(_with_mean(tensors, group), name, group)


def broadcast(tensor: Tensor, root: int, name: str | None, group: Any) -> Tensor:
    """Broadcast ``tensor``; the root gets the mean of the ranks' gradients, others zeros."""
    (sent,) = _with_mean([tensor], group)
    return collectives.broadcast(sent, root, name, group)


def reducescatter(tensors: Tensors, name: str | None, *arguments: Any) -> list[Tensor]:
    """Return rows of combined ``tensors``. ``arguments``: op, prescale, postscale, process set."""
    members = VerbsOfSet(collectives, arguments[3])
    sent = _changed(tensors, lambda grad: grad * tf.cast(members.size(), grad.dtype))
    return collectives.grouped_reducescatter(sent, name, *arguments)


def _with_mean(tensors: Tensors, group: Any) -> list[Tensor]:
    members = VerbsOfSet(collectives, group)
    return _changed(tensors, lambda grad: scaled(grad, Average, (1.0, 1.0), members))


def _changed(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return tensors with the same values, whose gradients are changed on their way back."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def unchanged(tensor: Tensor) -> Any:
        return tf.identity(tensor), backward(change)

    return [unchanged(tensor) for tensor in tensors]

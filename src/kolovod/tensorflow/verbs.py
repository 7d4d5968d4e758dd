"""The verbs on TensorFlow's tensors, eager or in a graph, with gradients.

As for PyTorch, the gradient is that of the *sum of all ranks' losses* with respect to this rank's
input: the gradient of an Average is an Average, that of a Sum a Sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError
from kolovod.handles import Handle
from kolovod.ops import Average, Op, Sum
from kolovod.submission import several
from kolovod.tensorflow import graph
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.world import current


class TensorflowCollectives(Collectives[tf.Tensor]):
    """The verbs on tensors. ``allreduce`` and ``grouped_allreduce`` work in ``tf.function`` too.

    These two can be differentiated; the others see values only, and their results carry no history.
    In-place verbs take variables.
    """

    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> tf.Tensor:
        """See Collectives.allreduce. Differentiable for Average and Sum.

        In a ``tf.function`` this adds an op: all those whose inputs are ready are on their way at
        the same time. Unnamed ones are matched by their place in the graph there, so all ranks
        trace the same function. Errors come as TensorFlow's: FailedPreconditionError for ranks
        that do not agree, UnavailableError for a rank that is gone, AbortedError for a world that
        is over, AlreadyExistsError for a name that is pending, InvalidArgumentError.
        """
        scales = (prescale_factor, postscale_factor)
        (result,) = _differentiable(self._reduced, [tensor], name, op, scales)
        return result

    def grouped_allreduce(
        self,
        tensors: Sequence[tf.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[tf.Tensor]:
        """See Collectives.grouped_allreduce and, for graphs, allreduce."""
        scales = (prescale_factor, postscale_factor)
        return _differentiable(self._reduced, list(several(tensors)), name, op, scales)

    def _reduced(
        self, tensors: Sequence[tf.Tensor], name: str | None, op: int, scales: tuple[float, float]
    ) -> list[tf.Tensor]:
        if not tf.executing_eagerly():
            return graph.allreduce(tensors, name, op, scales)
        return super().grouped_allreduce(tensors, name, op, *scales)

    def _run(self, *arguments: Any, **keywords: Any) -> None:
        _need_eager()
        super()._run(*arguments, **keywords)

    def _start(self, *arguments: Any, **keywords: Any) -> Handle[Any]:
        _need_eager()
        return super()._start(*arguments, **keywords)


_Reduce = Callable[[Sequence[tf.Tensor], "str | None", int, "tuple[float, float]"], list[tf.Tensor]]


def _differentiable(
    reduce: _Reduce,
    tensors: Sequence[tf.Tensor],
    name: str | None,
    op: int,
    scales: tuple[float, float],
) -> list[tf.Tensor]:
    def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
        if op not in (Average, Sum):
            raise InvalidArgumentError(
                f"allreduce with op {Op(op).name} has no gradient here; use Average or Sum"
            )
        backward = None if name is None else f"{name}.backward"
        return _differentiable(reduce, upstream, backward, op, scales)

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        return reduce(inputs, name, op, scales), gradient

    return list(reduced(*tensors)) if tensors else []


def _need_eager() -> None:
    if not tf.executing_eagerly():
        _refuse()


def _refuse() -> NoReturn:
    raise InvalidArgumentError(
        "inside tf.function only allreduce and grouped_allreduce work; call the other verbs outside"
    )


collectives = TensorflowCollectives(TensorflowFrontend(), current)

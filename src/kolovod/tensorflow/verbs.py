"""The verbs on TensorFlow's tensors, eager or in a graph, with gradients.

As for PyTorch, the gradient is that of the *sum of all ranks' losses* with respect to this rank's
input: the gradient of an Average is an Average, that of a Sum a Sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError
from kolovod.handles import Handle
from kolovod.ops import Average, Op, Sum
from kolovod.process_sets import number_of
from kolovod.submission import Group, several
from kolovod.tensorflow import graph
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.world import current

F = TypeVar("F")


def _as_it_is(function: F) -> F:
    """What AutoGraph, which rewrites the functions that it traces, leaves alone."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


class TensorflowCollectives(Collectives[tf.Tensor]):
    """The verbs on tensors. ``allreduce`` and ``grouped_allreduce`` work in ``tf.function`` too.

    These two can be differentiated; the others see values only, and their results carry no history.
    In-place verbs take variables.
    """

    @_as_it_is
    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> tf.Tensor:
        """See Collectives.allreduce. Differentiable for Average and Sum.

        In a ``tf.function`` this adds an op: all those whose inputs are ready are on their way at
        the same time. Unnamed ones are matched by their place in the graph there, so all ranks
        trace the same function. What nothing depends on is left out: use the result on all ranks
        or on none. Errors come as TensorFlow's: FailedPreconditionError for ranks that do not
        agree, AbortedError when a rank is gone or the world is over, AlreadyExistsError for a name
        that is pending, InvalidArgumentError.
        """
        scales = (prescale_factor, postscale_factor)
        (result,) = _Call(self, name, op, scales, process_set).differentiable([tensor])
        return result

    @_as_it_is
    def grouped_allreduce(
        self,
        tensors: Sequence[tf.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[tf.Tensor]:
        """See Collectives.grouped_allreduce and, for graphs, allreduce."""
        scales = (prescale_factor, postscale_factor)
        return _Call(self, name, op, scales, process_set).differentiable(several(tensors))

    def _run(self, *arguments: Any, **keywords: Any) -> Any:
        _need_eager()
        return super()._run(*arguments, **keywords)

    def _start(self, *arguments: Any, **keywords: Any) -> Handle[Any]:
        _need_eager()
        return super()._start(*arguments, **keywords)


class _Call(NamedTuple):
    """The arguments of an allreduce besides its tensors."""

    verbs: TensorflowCollectives
    name: str | None
    op: int
    scales: tuple[float, float]
    process_set: Group | None

    def differentiable(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            return self.backward().differentiable(upstream)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def reduced(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
            return self.run(inputs), gradient

        return list(reduced(*tensors)) if tensors else []

    def run(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        _, name, op, scales, process_set = self
        if not tf.executing_eagerly():
            return graph.allreduce(tensors, name, op, scales, number_of(process_set))
        # As the base class has it: here it would not end.
        return Collectives.grouped_allreduce(self.verbs, tensors, name, op, *scales, process_set)

    def backward(self) -> _Call:
        if self.op not in (Average, Sum):
            raise InvalidArgumentError(
                f"allreduce with op {Op(self.op).name} has no gradient here; use Average or Sum"
            )
        return self._replace(name=self.name and f"{self.name}.backward")


def _need_eager() -> None:
    if not tf.executing_eagerly():
        raise InvalidArgumentError(
            "inside tf.function only allreduce and grouped_allreduce work; call the other verbs "
            "outside"
        )


collectives = TensorflowCollectives(TensorflowFrontend(), current)

"""The way from a verb to a function that TensorFlow's tapes can differentiate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import tensorflow as tf

from kolovod.core.collectives import Collectives
from kolovod.core.process_sets import number_of
from kolovod.core.submission import Group, Request
from kolovod.tensorflow import frontend, gradients, graph
from kolovod.tensorflow.gradients import Tensors

F = TypeVar("F", bound=Callable[..., Any])


class VerbsOfSet:
    """The verbs on one process set in the mode of the moment, as gradients need them."""

    def __init__(self, verbs: Collectives, process_set: Group | None) -> None:
        self._verbs = verbs
        self._set = process_set

    @property
    def in_graph(self) -> bool:
        return not tf.executing_eagerly()

    def number(self) -> int:
        """Return the set's number. Raises InvalidArgumentError if this rank is not in it."""
        return number_of(self._set)

    def run(self, request: Request, tensors: Tensors) -> list[tf.Tensor]:
        return self._verbs.new_group(request._replace(process_set=self._set), list(tensors))

    def rank(self) -> Any:
        return (
            graph.fact("rank", self.number())
            if self.in_graph
            else self._verbs.membership(self._set).rank
        )

    def size(self) -> Any:
        return (
            graph.fact("size", self.number())
            if self.in_graph
            else self._verbs.membership(self._set).size
        )


def differentiable(
    run: Callable[[Tensors], list[tf.Tensor]],
    formula: Callable[[list[int], list[tf.Tensor]], list[tf.Tensor]],
    tensors: Sequence[Any],
) -> list[tf.Tensor]:
    """``run(tensors)``, whose gradients are made by ``formula`` (see gradients.of_group)."""
    if not tensors:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def made(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        outputs = run(inputs)

        def gradient(*upstream: tf.Tensor | None) -> list[tf.Tensor | None]:
            return gradients.of_group(outputs, upstream, formula)

        return outputs, backward(gradient)

    with _beside(tensors[0]):  # TensorFlow makes copies of what is returned, which go nowhere else
        return list(made(*tensors))


def _beside(tensor: Any) -> AbstractContextManager[None]:
    """Return a context on the tensor's device, if that is one that the engine does not reach."""
    device: str = getattr(tensor, "device", "")  # what is no tensor is refused later
    if not tf.executing_eagerly() or frontend.is_near(device):
        return contextlib.nullcontext()
    return tf.device(device)  # type: ignore[no-any-return]


def backward(gradient: F) -> F:
    """``gradient``, of what is made now, which contains verbs: see ``graph.anchored``."""
    anchor = graph.own_anchor()

    @functools.wraps(gradient)
    def run(*upstream: Any) -> Any:
        with graph.anchored(anchor):
            return gradient(*upstream)

    return run  # type: ignore[return-value]

"""The verbs on TensorFlow's tensors, eager or in a graph, with gradients (gradients.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import number_of
from kolovod.core.submission import Group, position_of, several
from kolovod.core.world import current
from kolovod.tensorflow import gradients, graph
from kolovod.tensorflow.asynchronous import TensorflowHandle, eager
from kolovod.tensorflow.differentiable import VerbsOfSet, differentiable
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.tensorflow.gradients import Tensors
from kolovod.tensorflow.sparse import summed

_ALLGATHER = _native.VERBS["allgather"]


class TensorflowCollectives(Collectives[tf.Tensor]):
    """The verbs on eager tensors, on variables, and on those of a ``tf.function``.

    In a ``tf.function`` a verb adds an op: all those whose inputs are ready are on their way at the
    same time. Unnamed ones are matched by their place in the graph there, so all ranks trace the
    same function. What nothing depends on is left out, but for barriers, joins and what is written
    to variables: use a result on all ranks or on none. What such an op fails with is of
    ``tf.errors``: FailedPreconditionError for ranks that do not agree, AbortedError when a rank is
    gone or the world is over, AlreadyExistsError for a name that is pending, InvalidArgumentError.
    What is raised in Python is of such a class and of the one of ``kolovod.errors``.

    Verbs that make a new tensor and are not asynchronous can be differentiated; the others see
    values only, and their results carry no history. In-place verbs take variables.
    """

    _handle_type = TensorflowHandle

    allreduce_async = eager(Collectives.allreduce_async)
    allreduce_async_ = eager(Collectives.allreduce_async_)
    grouped_allreduce_async = eager(Collectives.grouped_allreduce_async)
    grouped_allreduce_async_ = eager(Collectives.grouped_allreduce_async_)
    broadcast_async = eager(Collectives.broadcast_async)
    broadcast_async_ = eager(Collectives.broadcast_async_)
    allgather_async = eager(Collectives.allgather_async)
    grouped_allgather_async = eager(Collectives.grouped_allgather_async)
    alltoall_async = eager(Collectives.alltoall_async)
    reducescatter_async = eager(Collectives.reducescatter_async)
    grouped_reducescatter_async = eager(Collectives.grouped_reducescatter_async)

    @raising_tensorflows
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

        Of ``tf.IndexedSlices`` the values and indices are gathered, so that an index may come
        several times; only Average and Sum.
        """
        scales = (prescale_factor, postscale_factor)
        (result,) = self._allreduce([tensor], name, op, scales, process_set)
        return result

    @raising_tensorflows
    def grouped_allreduce(
        self,
        tensors: Sequence[tf.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[tf.Tensor]:
        """See Collectives.grouped_allreduce, and allreduce.

        ``tf.IndexedSlices`` may be among the tensors; they are gathered as one further operation.
        """
        scales = (prescale_factor, postscale_factor)
        return self._allreduce(several(tensors), name, op, scales, process_set)

    @raising_tensorflows
    def allreduce_(
        self,
        tensor: tf.Variable,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> tf.Variable:
        """See Collectives.allreduce_."""
        scales = (prescale_factor, postscale_factor)
        if tf.executing_eagerly():
            return super().allreduce_(tensor, name, op, *scales, process_set)
        (result,) = self._reduced_in_graph([tensor], name, op, scales, process_set)
        return result

    @raising_tensorflows
    def grouped_allreduce_(
        self,
        tensors: Sequence[tf.Variable],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[tf.Variable]:
        """See Collectives.grouped_allreduce_."""
        scales = (prescale_factor, postscale_factor)
        if tf.executing_eagerly():
            return super().grouped_allreduce_(tensors, name, op, *scales, process_set)
        return self._reduced_in_graph(several(tensors), name, op, scales, process_set)

    @raising_tensorflows
    def broadcast(
        self,
        tensor: tf.Tensor,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tf.Tensor:
        """See Collectives.broadcast. Differentiable."""
        root = position_of(root_rank, process_set)
        verbs = VerbsOfSet(self, process_set)

        def run(inputs: Tensors) -> list[tf.Tensor]:
            if verbs.in_graph:
                return graph.broadcast(inputs, root, name, verbs.number())
            return [Collectives.broadcast(self, inputs[0], root_rank, name, process_set)]

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            return gradients.of_broadcast(verbs, name, root, upstream)

        (result,) = differentiable(run, formula, [tensor])
        return result

    @raising_tensorflows
    def broadcast_(
        self,
        tensor: tf.Variable,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tf.Variable:
        """See Collectives.broadcast_."""
        if tf.executing_eagerly():
            return super().broadcast_(tensor, root_rank, name, process_set)
        self.frontend.claim(tensor)
        tensor.assign(self.broadcast(tensor, root_rank, name, process_set))
        return tensor

    @raising_tensorflows
    def allgather(
        self, tensor: tf.Tensor, name: str | None = None, process_set: Group | None = None
    ) -> tf.Tensor:
        """See Collectives.allgather. Differentiable."""
        (result,) = self._gathered([tensor], name, process_set)
        return result

    @raising_tensorflows
    def grouped_allgather(
        self,
        tensors: Sequence[tf.Tensor],
        name: str | None = None,
        process_set: Group | None = None,
    ) -> list[tf.Tensor]:
        """See Collectives.grouped_allgather. Differentiable."""
        return self._gathered(several(tensors), name, process_set)

    @raising_tensorflows
    def alltoall(
        self,
        tensor: tf.Tensor,
        splits: Sequence[int] | tf.Tensor | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tuple[tf.Tensor, Any]:
        """See Collectives.alltoall. Differentiable.

        In a graph the rows that each rank has sent are an int64 tensor, and the splits may be one.
        """
        verbs = VerbsOfSet(self, process_set)
        received: Any = None
        rows: Any = None

        def run(inputs: Tensors) -> list[tf.Tensor]:
            nonlocal received, rows
            if verbs.in_graph:
                result, received = graph.alltoall(inputs[0], splits, name, verbs.number())
            else:
                result, received = Collectives.alltoall(self, inputs[0], splits, name, process_set)
            rows = gradients.rows_of(inputs[0])
            return [result]

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            return [gradients.of_alltoall(verbs, name, received, rows, upstream[0])]

        (result,) = differentiable(run, formula, [tensor])
        return result, received

    @raising_tensorflows
    def reducescatter(
        self,
        tensor: tf.Tensor,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> tf.Tensor:
        """See Collectives.reducescatter. Differentiable for Average and Sum."""
        scales = (prescale_factor, postscale_factor)
        (result,) = self._scattered([tensor], name, op, scales, process_set)
        return result

    @raising_tensorflows
    def grouped_reducescatter(
        self,
        tensors: Sequence[tf.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[tf.Tensor]:
        """See Collectives.grouped_reducescatter. Differentiable for Average and Sum."""
        scales = (prescale_factor, postscale_factor)
        return self._scattered(several(tensors), name, op, scales, process_set)

    @raising_tensorflows
    def barrier(self, name: str | None = None, process_set: Group | None = None) -> None:
        """See Collectives.barrier. In a graph it runs though nothing depends on it."""
        if tf.executing_eagerly():
            super().barrier(name, process_set)
        else:
            graph.barrier(name, number_of(process_set))

    @raising_tensorflows
    def join(self, process_set: Group | None = None) -> Any:
        """See Collectives.join. In a graph the result is an int32 tensor.

        There it waits for the operations that stand before it in the same function, and those that
        stand after it wait for it.
        """
        if tf.executing_eagerly():
            return super().join(process_set)
        last = graph.join(number_of(process_set))
        return last if process_set is None else tf.gather(tf.constant(process_set.ranks), last)

    # inside -------------------------------------------------------------------------------------

    def _allreduce(
        self,
        tensors: Sequence[Any],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: Group | None,
    ) -> list[Any]:
        sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
        dense = [i for i in range(len(tensors)) if i not in sparse]
        results = [None] * len(tensors)
        if dense or not sparse:
            reduced = self._reduced([tensors[i] for i in dense], name, op, scales, process_set)
            for i, result in zip(dense, reduced, strict=True):
                results[i] = result
        if sparse:
            slices = [tensors[i] for i in sparse]
            name = name and f"{name}.sparse"
            for i, total in zip(
                sparse, summed(self, slices, name, op, scales, process_set), strict=True
            ):
                results[i] = total
        return results

    def _reduced(
        self,
        tensors: Sequence[Any],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: Group | None,
    ) -> list[tf.Tensor]:
        verbs = VerbsOfSet(self, process_set)

        def run(inputs: Tensors) -> list[tf.Tensor]:
            if verbs.in_graph:
                return graph.allreduce(inputs, name, op, scales, verbs.number())
            return Collectives.grouped_allreduce(self, inputs, name, op, *scales, process_set)

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            return gradients.of_allreduce(verbs, name, op, scales, upstream)

        return differentiable(run, formula, tensors)

    def _reduced_in_graph(
        self,
        variables: Sequence[Any],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: Group | None,
    ) -> list[Any]:
        """``variables``, once they are assigned what an op of the graph makes of their values."""
        for variable in variables:
            self.frontend.claim(variable)
        results = graph.allreduce(variables, name, op, scales, number_of(process_set))
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)
        return list(variables)

    def _gathered(
        self, tensors: Sequence[Any], name: str | None, process_set: Group | None
    ) -> list[tf.Tensor]:
        verbs = VerbsOfSet(self, process_set)
        starts: Any = None
        rows: list[Any] = []

        def run(inputs: Tensors) -> list[tf.Tensor]:
            nonlocal starts, rows
            if verbs.in_graph:
                results, starts = graph.allgather(inputs, name, verbs.number())
            else:
                results, starts = self._gathered_now(inputs, name, process_set)
            rows = [gradients.rows_of(tensor) for tensor in inputs]
            return results

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            mine = [starts[i] for i in places], [rows[i] for i in places]
            return gradients.of_allgather(verbs, name, *mine, upstream)

        return differentiable(run, formula, tensors)

    def _gathered_now(
        self, tensors: Tensors, name: str | None, process_set: Group | None
    ) -> tuple[list[tf.Tensor], list[int]]:
        """The gathered eager tensors, and the first row of each that is this rank's."""
        views = [self._view(tensor) for tensor in tensors]
        rank = self.membership(process_set).rank

        def finish(engine: _native.Engine, number: int) -> Any:
            rows = [engine.rows(number, i) for i in range(len(views))]
            outputs = [
                self._made(engine, number, i, view, sum(rows[i]), tensors[i])
                for i, view in enumerate(views)
            ]
            return outputs, [sum(each[:rank]) for each in rows]

        entries = [(*view[:3], 0) for view in views]
        results: tuple[list[tf.Tensor], list[int]] = self._run(
            process_set, _ALLGATHER, name, entries, Sum, 1.0, 1.0, 0, views, finish
        )
        return results

    def _scattered(
        self,
        tensors: Sequence[Any],
        name: str | None,
        op: int,
        scales: tuple[float, float],
        process_set: Group | None,
    ) -> list[tf.Tensor]:
        verbs = VerbsOfSet(self, process_set)

        def run(inputs: Tensors) -> list[tf.Tensor]:
            if verbs.in_graph:
                return graph.reducescatter(inputs, name, op, scales, verbs.number())
            return Collectives.grouped_reducescatter(self, inputs, name, op, *scales, process_set)

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            return gradients.of_reducescatter(verbs, name, op, scales, upstream)

        return differentiable(run, formula, tensors)


collectives = TensorflowCollectives(TensorflowFrontend(), current)

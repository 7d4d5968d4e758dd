"""The verbs on TensorFlow's tensors, eager or in a graph, with gradients (gradients.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.collectives import Collectives
from kolovod.core.process_sets import number_of
from kolovod.core.submission import Group, Request, several
from kolovod.core.verbs import ALLGATHER, ALLREDUCE, ALLTOALL, VERBS
from kolovod.core.world import current
from kolovod.tensorflow import gradients, graph
from kolovod.tensorflow.asynchronous import TensorflowHandle, eager
from kolovod.tensorflow.differentiable import VerbsOfSet, differentiable
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.frontend import TensorflowFrontend
from kolovod.tensorflow.gradients import Tensors
from kolovod.tensorflow.sparse import summed


class TensorflowCollectives(Collectives):
    """The verbs on eager tensors, on variables, and on those of a ``tf.function``.

    In a ``tf.function`` a verb adds an op: all those whose inputs are ready are on their way at the
    same time. Unnamed ones are matched by their place in the graph there, so all ranks trace the
    same function. What nothing depends on is left out, but for barriers, joins and what is written
    to variables: use a result on all ranks or on none. What such an op fails with is of
    ``tf.errors``: FailedPreconditionError for ranks that do not agree, AbortedError when a rank is
    gone or the world is over, AlreadyExistsError for a name that is pending, InvalidArgumentError.
    What is raised in Python is of such a class and of the one of ``kolovod.errors``.

    Verbs that make a new tensor and are not asynchronous can be differentiated (reductions: Average
    and Sum only); the others see values only, and their results carry no history. In-place verbs
    take variables.

    Of ``tf.IndexedSlices`` an allreduce gathers the values and indices, as one further operation,
    so that an index may come several times; only Average and Sum. In a graph an alltoall returns
    the rows that each rank has sent as an int64 tensor, and its splits may be one.
    """

    handle_type = TensorflowHandle

    def new(self, request: Request, tensor: Any) -> Any:
        """Carry out ``request`` on one tensor, into a new one, in a graph, too."""
        ((result,), _) = self.new_with_rows(request, [tensor])
        return result

    def new_with_rows(
        self, request: Request, tensors: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Carry out ``request`` on tensors, maybe sparse ones; return results and rows by rank."""
        sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
        if not sparse or request.verb is not ALLREDUCE:
            return self._new_dense(request, tensors)
        dense = [i for i in range(len(tensors)) if i not in sparse]
        results = dict(
            zip(dense, self._new_dense(request, [tensors[i] for i in dense])[0], strict=True)
        )
        of_sparse = request._replace(name=request.name and f"{request.name}.sparse")
        totals = summed(self, [tensors[i] for i in sparse], of_sparse)
        results |= zip(sparse, totals, strict=True)
        return [results[i] for i in range(len(tensors))], []

    def _new_dense(
        self, request: Request, tensors: Sequence[Any]
    ) -> tuple[list[tf.Tensor], list[Any]]:
        verb, verbs = request.verb, VerbsOfSet(self, request.process_set)
        told: Any = []  # what the operation says of rows
        own_rows: list[Any] = []

        def run(inputs: Tensors) -> list[tf.Tensor]:
            nonlocal told, own_rows
            if verbs.in_graph:
                results, rows = graph.run(request, inputs, verbs.number())
                told = [rows] if verb is ALLTOALL else rows
            else:
                results, told = Collectives.new_with_rows(self, request, inputs)
                if verb is ALLGATHER:
                    rank = verbs.rank()
                    told = [sum(rows[:rank]) for rows in told]
            own_rows = (
                [gradients.rows_of(tensor) for tensor in inputs] if verb.makes_outputs else []
            )
            return results

        def formula(places: list[int], upstream: list[tf.Tensor]) -> list[tf.Tensor]:
            rows = [own_rows[i] for i in places] if verb.makes_outputs else []
            starts = [told[i] for i in places] if verb is ALLGATHER else []
            received = told[0] if verb is ALLTOALL else None
            return gradients.of_verb(verbs, request, rows, starts, received, upstream)

        return differentiable(run, formula, tensors), told

    def in_place(self, request: Request, tensor: Any) -> Any:
        """Carry out ``request`` on one tensor in place; a graph assigns to the variable."""
        if tf.executing_eagerly():
            return super().in_place(request, tensor)
        self._assign_in_graph(request, [tensor])
        return tensor

    def group_in_place(self, request: Request, tensors: Sequence[Any]) -> list[Any]:
        """Carry out ``request`` on several tensors in place; a graph assigns to the variables."""
        if tf.executing_eagerly():
            return super().group_in_place(request, tensors)
        self._assign_in_graph(request, several(tensors))
        return list(tensors)

    def _assign_in_graph(self, request: Request, variables: Sequence[Any]) -> None:
        """Let the ``variables`` be assigned what an op of the graph makes of their values."""
        for variable in variables:
            self.frontend.claim(variable)
        results, _ = graph.run(request, variables, number_of(request.process_set))
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)

    def barrier(self, name: str | None = None, process_set: Group | None = None) -> None:
        """Return once every rank has called it; a graph runs it though nothing depends on it."""
        if tf.executing_eagerly():
            super().barrier(name, process_set)
        else:
            graph.barrier(name, number_of(process_set))

    def join(self, process_set: Group | None = None) -> Any:
        """Say that this rank has no data left, and wait until all have said so (Collectives.join).

        In a graph the result is an int32 tensor. There it waits for the operations that stand
        before it in the same function, and those that stand after it wait for it.
        """
        if tf.executing_eagerly():
            return super().join(process_set)
        last = graph.join(number_of(process_set))
        return last if process_set is None else tf.gather(tf.constant(process_set.ranks), last)


for _verb in VERBS.values():
    for _form in _verb.forms:
        if method := getattr(TensorflowCollectives, _form, None):  # send and recv are none
            _wrap = eager if "_async" in _form else raising_tensorflows
            setattr(TensorflowCollectives, _form, _wrap(method))

collectives = TensorflowCollectives(TensorflowFrontend(), current)

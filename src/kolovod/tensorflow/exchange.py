"""A step's gradients, made those of all ranks: what tapes and optimizers have in common.

Dense gradients travel in buckets of about 1 MiB, each an op of its own whose result nobody waits
for but those who use it: in a ``tf.function`` a bucket is on its way while backward computes the
next. Buckets are cut from the last source to the first, the order in which backward finishes, and
are the same on all ranks since the sources are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.ops import Adasum, Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import exchange, plan
from kolovod.gradients.compression import AnyCompressor, Compression, Key
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec
from kolovod.tensorflow import alike, kinds, repeated
from kolovod.tensorflow.differentiable import VerbsOfSet
from kolovod.tensorflow.gradients import scaled
from kolovod.tensorflow.verbs import TensorflowCollectives, collectives

Gradient = Any
"""A tf.Tensor, tf.IndexedSlices, or None where the target does not depend on the source."""


class SparseOpError(FrontEndArgumentError, NotImplementedError):
    """Sparse gradients can be added up and averaged, nothing else."""


class GradientExchange:
    """Combines gradients over the ranks: ``exchange(gradients, sources)``. See ``__init__``."""

    def __init__(
        self,
        compression: AnyCompressor = Compression.none,
        op: int = Average,
        process_set: ProcessSet | None = None,
        *,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Iterable[Any]] | None = None,
        sparse_as_dense: bool = False,
        local_sources: Iterable[Any] = (),
        scale_local_gradients: bool = True,
        verbs: TensorflowCollectives = collectives,
    ) -> None:
        """Take the options of ``DistributedGradientTape``. Raises InvalidArgumentError."""
        self.spec = ReduceSpec.checked(
            compression,
            op,
            gradient_predivide_factor,
            process_set,
            (Average, Sum, Adasum),
            sparse_as_dense=sparse_as_dense,
        )
        if _is_local_source(local_sources):
            raise FrontEndArgumentError(
                f"local_sources is a {type(local_sources).__name__}: give a list of such"
            )
        self.verbs = verbs
        self._groups = Groups(groups, "variables", _key)
        self._scale_local = scale_local_gradients
        self._local = list(local_sources)
        for source in self._local:
            _check_local(source)

    def add_local(self, source: Any) -> None:
        """Leave the gradient of ``source`` (or of a layer's weights) to this rank alone."""
        _check_local(source)
        self._local.append(source)

    @property
    def is_member(self) -> bool:
        """True if this rank takes part. Raises InvalidArgumentError for a set not added."""
        process_set = self.spec.process_set
        if process_set is not None and process_set.process_set_id is None:
            process_set.membership()
        return self.spec.is_member

    @property
    def size(self) -> int:
        """The number of ranks that take part."""
        return self.verbs.membership(self.spec.process_set).size

    def __call__(self, gradients: Sequence[Gradient], sources: Sequence[Any]) -> list[Gradient]:
        """The combined gradients, in the order given.

        ``gradients``: of ``sources``, each of its source's shape. All ranks give the same sources.
        None counts as zeros where another rank has a gradient; in a graph, which cannot know,
        that is an error. In an elastic job all of them are one step.
        """
        is_graph = not tf.executing_eagerly()
        if not transaction().is_elastic:
            return self._combined(gradients, sources, is_graph)
        own = list(gradients)
        if self.spec.sparse_as_dense:
            own = [_densified(gradient) for gradient in own]
        combined: list[Gradient] = repeated.run_in_transaction(
            lambda each: self._combined(each, sources, is_graph), own, counts=True
        )
        return combined

    def _combined(
        self, gradients: Sequence[Gradient], sources: Sequence[Any], is_graph: bool
    ) -> list[Gradient]:
        """Do what ``__call__`` says. ``is_graph``: a graph has called, in which None stays None."""
        results = list(gradients)
        if not self.is_member:
            return results
        if self.size == 1 and tf.executing_eagerly():  # a graph may be used in another world, too
            return results
        if not tf.executing_eagerly():
            exchange.refuse_state(self.spec.compressor, "a graph of TensorFlow")
        local = {id(variable_of(source)) for source in self._all_local()}
        is_local = [id(variable_of(source)) in local for source in sources]
        results = self._agreed(results, sources, is_local, is_graph)
        dense, sparse = [], []
        for i, gradient in enumerate(results):
            if gradient is None:
                continue
            if is_local[i]:
                results[i] = divided(gradient, self._members()) if self._scale_local else gradient
            elif not isinstance(gradient, tf.IndexedSlices):
                dense.append(i)
            elif self.spec.sparse_as_dense:
                results[i] = tf.convert_to_tensor(gradient)
                dense.append(i)
            else:
                sparse.append(i)
        for bucket in self._buckets(dense, results, sources):
            self._combine(bucket, results, sources)
        if sparse:
            self._combine_sparse(sparse, results)
        self._compare(dense, sources, gradients)
        return results

    def _agreed(
        self,
        gradients: list[Gradient],
        sources: Sequence[Any],
        is_local: Sequence[bool],
        is_graph: bool,
    ) -> list[Gradient]:
        """``gradients`` of the kinds that all ranks have."""
        as_dense = self.spec.sparse_as_dense
        known = [
            kinds.kind_of(gradient, is_local=here, as_dense=as_dense)
            for gradient, here in zip(gradients, is_local, strict=True)
        ]
        names = [_own_name_of(source) for source in sources]
        told = kinds.Kinds(self.verbs, self.spec.process_set, known, sources, names)
        if not tf.executing_eagerly():
            with tf.control_dependencies([told.check_in_graph()]):
                return [None if g is None else _same(g) for g in gradients]
        told.tell()
        wanted = [told.of(i) for i in range(len(sources))]
        if is_graph:
            told.refuse_missing()
        return [
            kinds.empty(kind, source) if g is None and kind not in (kinds.NONE, kinds.LOCAL) else g
            for g, kind, source in zip(gradients, wanted, sources, strict=True)
        ]

    def _compare(
        self, indices: Sequence[int], sources: Sequence[Any], gradients: Sequence[Gradient]
    ) -> None:
        """Compare the ranks' values of their variables, but not amid a step of Adasum.

        ``gradients``: this rank's own.
        """
        if self.spec.op == Adasum:
            return
        own = [i for i in indices if isinstance(variable_of(sources[i]), tf.Variable)]
        variables = [variable_of(sources[i]) for i in own]
        names = [_name_of(sources[i]) for i in own]
        grads = [gradients[i] for i in own]
        alike.compare(variables, names, grads, self.verbs, self.spec.process_set)

    def _all_local(self) -> Iterator[Any]:
        for source in self._local:  # a layer has its weights only once it is built
            yield from getattr(source, "trainable_weights", [source])

    def _members(self) -> VerbsOfSet:
        return VerbsOfSet(self.verbs, self.spec.process_set)

    def _combine(self, bucket: list[int], results: list[Gradient], sources: Sequence[Any]) -> None:
        gradients = [(Key(i, _name_of(sources[i])), results[i]) for i in bucket]
        submit = exchange.by(self.verbs, self.spec, at_once=True)  # a graph knows ops by place
        how = self.spec.op, (1.0, self.spec.scale), self._members()
        combined = exchange.start(
            self.spec, "", gradients, submit, lambda total: scaled(total, *how)
        )()
        for i, gradient in zip(bucket, combined, strict=True):
            results[i] = gradient

    def _combine_sparse(self, indices: list[int], results: list[Gradient]) -> None:
        """Gather values and indices: a row that several ranks have is there several times."""
        if self.spec.op not in (Average, Sum):
            raise SparseOpError(
                "op Adasum cannot combine sparse gradients: give sparse_as_dense=True"
            )
        # Outside of graphs all are there already, so that one operation takes them.
        for part in [indices] if tf.executing_eagerly() else [[i] for i in reversed(indices)]:
            slices = [results[i] for i in part]
            combined = self.verbs.grouped_allreduce(
                slices, op=self.spec.op, process_set=self.spec.process_set
            )
            for i, together in zip(part, combined, strict=True):
                results[i] = together

    def _buckets(
        self, dense: list[int], gradients: list[Gradient], sources: Sequence[Any]
    ) -> list[list[int]]:
        """Which gradients travel together, the last first; see ``groups``."""
        if not self._groups and tf.executing_eagerly():
            return [dense] if dense else []
        groups = self._groups.among({i: sources[i] for i in dense})
        return plan.cut({i: _bytes(gradients[i], sources[i]) for i in reversed(dense)}, groups)


def _same(gradient: Gradient) -> Gradient:
    """Return the same gradient, after what it depends on in a graph."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.identity(gradient)
    return tf.IndexedSlices(tf.identity(gradient.values), gradient.indices, gradient.dense_shape)


def _densified(gradient: Gradient) -> Gradient:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_sparse else gradient


def divided(gradient: Gradient, members: VerbsOfSet) -> Gradient:
    """``gradient`` by the number of ranks: in a graph by that of the time when it is run."""
    if not isinstance(gradient, tf.IndexedSlices):
        return scaled(gradient, Average, (1.0, 1.0), members)
    values = scaled(gradient.values, Average, (1.0, 1.0), members)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def adopt(given: Any, addition: type, exchange: GradientExchange) -> None:
    """Put ``addition`` before the class of ``given``, a tape or an optimizer."""
    base = type(given)
    fields = {"__module__": base.__module__, "__doc__": base.__doc__}
    given.__class__ = type(base.__name__, (addition, base), fields)
    given._kolovod_exchange = exchange


def variable_of(source: Any) -> Any:
    """The tf.Variable within a variable of Keras 3; others are what they are."""
    value = getattr(source, "value", None)
    return value if isinstance(value, tf.Variable) else source


def _name_of(source: Any) -> str:
    """Return the name of a variable, or a tensor."""
    name = getattr(source, "path", None) or getattr(variable_of(source), "name", "")
    return str(name).removesuffix(":0")


def _own_name_of(source: Any) -> str:
    """Return the name without what a process adds: its layers' names and a number at the end."""
    return re.sub(r"_\d+$", "", _name_of(source).split("/")[-1])


def _key(source: Any) -> int | None:
    """Return the identity of a variable; None for what is no variable."""
    variable = variable_of(source)
    return id(variable) if isinstance(variable, tf.Variable) else None


def _is_local_source(value: Any) -> bool:
    return tf.is_tensor(variable_of(value)) or hasattr(value, "trainable_weights")


def _check_local(source: Any) -> None:
    if not _is_local_source(source):
        raise FrontEndArgumentError(
            f"a local source is a variable, or a Keras layer, not a {type(source).__name__}"
        )


def _bytes(gradient: tf.Tensor, source: Any) -> int:
    shape = gradient.shape if gradient.shape.is_fully_defined() else tf.TensorShape(source.shape)
    if not shape.is_fully_defined():
        return plan.BUCKET_BYTES
    count: int = shape.num_elements() * gradient.dtype.size
    return count

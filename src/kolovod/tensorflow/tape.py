"""DistributedGradientTape: a tape whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.tensorflow.errors import raising_tensorflows
from kolovod.tensorflow.exchange import GradientExchange, adopt
from kolovod.tensorflow.verbs import TensorflowCollectives, collectives


class Distributed(tf.GradientTape):  # type: ignore[misc]
    """The methods that ``DistributedGradientTape`` adds to the class of the tape it is given."""

    _kolovod_exchange: GradientExchange

    @raising_tensorflows
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return tf.GradientTape's gradients, combined over the ranks.

        All ranks call it with the same sources. Where the target does not depend on a source the
        gradient is None; it counts as zeros where another rank has one. A ``tf.function``, which
        is traced without knowing of other ranks, cannot do that: there all ranks must have None
        for the same sources. Raises MismatchError on every rank where sources differ, or one has a
        dense gradient and another tf.IndexedSlices; a ``tf.function`` fails with
        tf.errors.InvalidArgumentError then, or FailedPreconditionError for other shapes.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)
        return self.combine(own, sources)

    def combine(self, gradients: Any, sources: Any) -> Any:
        """Return this rank's ``gradients`` of ``sources``, combined over the ranks."""
        flat = tf.nest.flatten(gradients)
        combined = self._kolovod_exchange(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, combined)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of ``source`` to this rank alone; see ``local_sources``."""
        self._kolovod_exchange.add_local(source)


@raising_tensorflows
def DistributedGradientTape(
    tape: tf.GradientTape,
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
) -> Distributed:
    """Have ``tape.gradient`` return all ranks' gradients combined, and return ``tape``.

    The object stays what it was; wrap it before, within or after its ``with`` block, in a
    ``tf.function`` or outside. Its other methods (``jacobian``, ...) stay this rank's own.

    ``compression``: ``Compression.none``, ``.fp16``, ``.bf16``, between hosts ``.int8``, ``.int4``
    (see ``Compression``), or, outside of a ``tf.function``, a
    ``Compressor``; for dense gradients.
    ``op``: Average, Sum, or Adasum, which combines the gradients themselves here.
    ``process_set``: its members combine among themselves, other ranks keep their own gradients.
    None: all ranks.
    ``gradient_predivide_factor``: with Average, divide gradients by it before they are added up,
    and the sum by what is left of the number of ranks: to keep float16 within its range.
    ``groups``: gradients that travel together: how many groups (neighbours among the sources), or
    lists of variables; others are grouped by size. None: all by size.
    ``sparse_as_dense``: send tf.IndexedSlices with all their zeros, where many rows are touched;
    else their values and indices are gathered.
    ``local_sources``: variables that each rank has of its own, or Keras layers of such: their
    gradients are not combined, but divided by the number of ranks if ``scale_local_gradients``,
    so that they are those of the ranks' mean loss, too.
    ``verbs``: over another world than the process's own (tests).

    Raises InvalidArgumentError for arguments that cannot work.
    """
    if not isinstance(tape, tf.GradientTape):
        raise FrontEndArgumentError(f"tape is a {type(tape).__name__}: give a tf.GradientTape")
    if isinstance(tape, Distributed):
        raise FrontEndArgumentError("this tape is already distributed; wrap it once")
    exchange = GradientExchange(
        compression,
        op,
        process_set,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        local_sources=local_sources,
        scale_local_gradients=scale_local_gradients,
        verbs=verbs,
    )
    adopt(tape, Distributed, exchange)
    assert isinstance(tape, Distributed)
    return tape

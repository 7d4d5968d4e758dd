"""The kinds of gradients that ranks have of the same sources, told before gradients are sent.

A gradient is None where a loss does not depend on a source, so it may be None on some ranks only:
experts, tasks. What travels has no names, so without this the gradients of different variables
could be combined with each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kolovod.core.objects import Objects
from kolovod.core.ops import Max
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import MismatchError
from kolovod.gradients import agreement
from kolovod.tensorflow.verbs import TensorflowCollectives

NONE, DENSE, SPARSE_32, SPARSE_64, LOCAL = range(5)
_KINDS = 5
_SPARSE = (SPARSE_32, SPARSE_64)
_DIGEST_BYTES = 8


class Kinds:
    """The kinds of one exchange: of each source one, here; all that some rank has, in ``union``."""

    def __init__(
        self,
        verbs: TensorflowCollectives,
        process_set: ProcessSet | None,
        kinds: Sequence[int],
        sources: Sequence[Any],
        names: Sequence[str],
    ) -> None:
        """``names``: of ``sources``, the same on all ranks."""
        self._verbs, self._process_set = verbs, process_set
        self._kinds, self._names = kinds, names
        self._details = [
            (name, (tuple(source.shape), source.dtype.name if _has_name(source) else source.dtype))
            for name, source in zip(names, sources, strict=True)
        ]
        self.union: np.ndarray = np.zeros(0)
        """A mark for each source and kind: whether a rank has it."""

    def tell(self) -> None:
        """Find out ``union``, outside of graphs. Raises MismatchError for other sources."""
        total = self._told().numpy()
        if not _is_same(total[: 2 * _DIGEST_BYTES]):
            objects = Objects(self._verbs.world)
            agreement.agree(
                objects, self._details, "source", "gradients.sources", self._process_set
            )
        self.union = total[2 * _DIGEST_BYTES :].reshape(-1, _KINDS)

    def of(self, index: int) -> int:
        """Return the kind that a rank without a gradient sends.

        Raises MismatchError where ranks differ.
        """
        kinds = [int(kind) for kind in np.flatnonzero(self.union[index]) if kind != NONE]
        if len(kinds) > 1:
            name = self._names[index]
            if LOCAL in kinds:
                raise MismatchError(
                    f"'{name}' is a local source on some ranks only: give the same on all"
                )
            if DENSE in kinds:
                raise MismatchError(
                    f"the gradient of '{name}' is dense on one rank, and tf.IndexedSlices on "
                    "another: give sparse_as_dense=True"
                )
        return kinds[0] if kinds else NONE

    def refuse_missing(self) -> None:
        """Raise MismatchError where some ranks have a gradient and others have none."""
        for index, kinds in enumerate(self.union):
            if kinds[NONE] and kinds.sum() > 1:
                raise MismatchError(_missing(f"'{self._names[index]}'"))

    def check_in_graph(self) -> tf.Operation:
        """Return an op that fails if, when it runs, ranks have other kinds or other sources."""
        total = self._told()
        first, second = total[:_DIGEST_BYTES], total[_DIGEST_BYTES : 2 * _DIGEST_BYTES]
        same = tf.reduce_all(tf.equal(tf.cast(first, tf.int32) + tf.cast(second, tf.int32), 255))
        union = tf.reshape(total[2 * _DIGEST_BYTES :], [-1, _KINDS])
        differs = tf.greater(tf.reduce_sum(tf.cast(union, tf.int32), axis=1), 1)
        names = tf.boolean_mask(tf.constant(self._names, tf.string), differs)
        others = "ranks give other sources to gradient(), or in another order; here:"
        with tf.control_dependencies([tf.debugging.Assert(same, [others, self._names])]):
            check: tf.Operation = tf.debugging.Assert(
                tf.logical_not(tf.reduce_any(differs)), [_missing("these"), names]
            )
        return check

    def _told(self) -> Any:
        """All that some rank says: a digest of its sources' names, its complement, and its kinds.

        Shapes the engine compares.
        """
        text = repr(self._names).encode()
        digest = np.frombuffer(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), np.uint8)
        kinds = np.zeros((len(self._kinds), _KINDS), np.uint8)
        kinds[np.arange(len(self._kinds)), self._kinds] = 1
        said = np.concatenate([digest, 255 - digest, kinds.reshape(-1)])
        return self._verbs.allreduce(tf.constant(said), op=Max, process_set=self._process_set)


def kind_of(gradient: Any, *, is_local: bool, as_dense: bool) -> int:
    """Return the kind of this rank's gradient. ``as_dense``: tf.IndexedSlices are sent dense."""
    if is_local:
        return LOCAL
    if gradient is None:
        return NONE
    if as_dense or not isinstance(gradient, tf.IndexedSlices):
        return DENSE
    return SPARSE_32 if gradient.indices.dtype == tf.int32 else SPARSE_64


def empty(kind: int, source: Any) -> Any:
    """Return a stand-in for a gradient of ``source`` that other ranks have, of that kind."""
    shape, dtype = tuple(source.shape), tf.as_dtype(source.dtype)
    if kind not in _SPARSE:
        return tf.zeros(shape, dtype)
    indices = tf.zeros([0], tf.int32 if kind == SPARSE_32 else tf.int64)
    return tf.IndexedSlices(tf.zeros((0, *shape[1:]), dtype), indices, tf.constant(shape))


def _missing(which: str) -> str:
    return (
        f"some ranks have a gradient of {which} of another kind than others, or none, which a "
        "graph cannot make good: let the loss depend on the same variables on all ranks (add "
        "0.0 * tf.reduce_sum(variable), say), or leave tf.function out"
    )


def _has_name(source: Any) -> bool:
    return hasattr(source.dtype, "name")


def _is_same(digests: np.ndarray) -> bool:
    first, second = digests[:_DIGEST_BYTES].astype(int), digests[_DIGEST_BYTES:].astype(int)
    return bool((first + second == 255).all())

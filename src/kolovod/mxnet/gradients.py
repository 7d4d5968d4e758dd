"""Gradients of all ranks together, while MXNet still computes some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from kolovod import _native
from kolovod.core.handles import Handle
from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.agreement import SAME_MODEL, agree_on_optimizer
from kolovod.gradients.compression import Compression, Compressor
from kolovod.gradients.validation import check_averaging
from kolovod.mxnet.verbs import MxnetCollectives

_BUCKET_BYTES = 1 << 20


class Way(NamedTuple):
    """How gradients travel: ``postscale * op(prescale * gradient)``, compressed."""

    compression: type[Compressor] = Compression.none
    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    groups: int = 0
    """So many groups of neighbours travel whole; 0: buckets of about 1 MiB."""


class Gradient(NamedTuple):
    """The gradient of one parameter."""

    name: str
    arrays: list[mx.nd.NDArray]
    """One for each of this rank's devices; their sum is this rank's gradient."""


class GradientReducer:
    """Makes gradients equal on the ranks of a process set. One per optimizer."""

    def __init__(
        self, verbs: MxnetCollectives, way: Way, process_set: Any = None, prefix: str = ""
    ) -> None:
        """``process_set``: others keep their own gradients. ``prefix``: begins the names."""
        self.way = way
        self._verbs = verbs
        self._set = process_set
        self._prefix = prefix
        self._engine: _native.Engine | None = None  # of the world whose ranks have agreed
        self._number = 0  # of this optimizer in that world

    def is_member(self) -> bool:
        """Whether this rank takes part. Raises NotInitializedError."""
        return self._set is None or self._verbs.world().rank in self._set.ranks

    def reduce_all(self, gradients: Sequence[Gradient]) -> None:
        """Overwrite the gradients of a whole model, the last first: backward makes them so.

        Each bucket is on its way as soon as MXNet has computed its gradients, while it computes
        those before. Raises MismatchError, on every rank, when ranks have other parameters.
        """
        if not self.is_member():
            return
        described = [(g.name, (g.arrays[0].shape, str(g.arrays[0].dtype))) for g in gradients]
        self._agree(described)
        buckets = self._buckets(gradients)
        pending = [self._start(bucket, str(i)) for i, bucket in enumerate(buckets)]
        for finish in pending:
            finish.wait()

    def reduce(self, gradients: Sequence[Gradient]) -> None:
        """Overwrite some gradients, of which all ranks know that they come together."""
        if not self.is_member():
            return
        self._agree([])
        names = [gradient.name for gradient in gradients]
        self._start(gradients, names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}").wait()

    def _agree(self, described: list[tuple[str, Any]]) -> None:
        """Once in each world, find a number for this optimizer that it has on all ranks."""
        engine = self._verbs.membership(self._set).engine
        if engine is not self._engine:
            self._number, _ = agree_on_optimizer(
                self._verbs.world, described, SAME_MODEL, [], self._set
            )
            self._engine = engine

    def _buckets(self, gradients: Sequence[Gradient]) -> Iterator[Sequence[Gradient]]:
        backwards = gradients[::-1]
        if self.way.groups:
            parts = np.array_split(np.arange(len(backwards)), self.way.groups)
            yield from (backwards[part[0] : part[-1] + 1] for part in parts if len(part))
            return
        bucket: list[Gradient] = []
        filled = 0
        for gradient in backwards:
            array = gradient.arrays[0]
            size = array.size * np.dtype(array.dtype).itemsize
            if bucket and filled + size > _BUCKET_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(gradient)
            filled += size
        if bucket:
            yield bucket

    def _start(self, bucket: Sequence[Gradient], name: str) -> _Pending:
        way = self.way
        for gradient in bucket:
            _add_up(gradient.arrays)
        sent = [way.compression.compress(gradient.arrays[0]) for gradient in bucket]
        handle = self._verbs.grouped_allreduce_async_(
            [small for small, _ in sent],
            f"{self._prefix}gradients.{self._number}.{name}",
            way.op,
            way.prescale,
            way.postscale,
            self._set,
        )
        return _Pending(handle, bucket, [context for _, context in sent], way.compression)


class _Pending(NamedTuple):
    """A bucket that is on its way."""

    handle: Handle[list[mx.nd.NDArray]]
    bucket: Sequence[Gradient]
    contexts: list[Any]
    compression: type[Compressor]

    def wait(self) -> None:
        """Wait, and write the results where the gradients were."""
        results = self.handle.wait()
        for small, context, gradient in zip(results, self.contexts, self.bucket, strict=True):
            result = self.compression.decompress(small, context)
            for array in gradient.arrays:
                if array is not result:
                    result.copyto(array)


def _add_up(arrays: list[mx.nd.NDArray]) -> None:
    """Put the sum over this rank's devices into the first."""
    for other in arrays[1:]:
        arrays[0][:] = arrays[0] + other.as_in_context(arrays[0].context)


def way_of(
    compression: type[Compressor],
    op: int,
    gradient_predivide_factor: float,
    groups: int,
    process_set: ProcessSet | None,
) -> Way:
    """Check what an optimizer was given. Raises InvalidArgumentError for what cannot work."""
    factor = gradient_predivide_factor
    check_averaging(compression, op, factor, process_set, (Average, Sum))
    if not isinstance(groups, int) or groups < 0:
        raise InvalidArgumentError(
            f"groups is {groups!r}: give how many, or 0 for buckets of a fixed size"
        )
    if compression is Compression.bf16:
        raise InvalidArgumentError("MXNet has no bfloat16: give Compression.none or .fp16")
    return Way(compression, op, 1.0 / factor, factor, groups)

"""Gradients of all ranks together, while MXNet still computes some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from kolovod.core.ops import Average, Sum
from kolovod.core.process_sets import ProcessSet
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import exchange, plan
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.plan import Groups
from kolovod.gradients.spec import ReduceSpec
from kolovod.mxnet.verbs import MxnetCollectives


class Gradient(NamedTuple):
    """The gradient of one parameter."""

    name: str
    arrays: list[mx.nd.NDArray]
    """One for each of this rank's devices; their sum is this rank's gradient."""


class GradientReducer:
    """Makes gradients equal on the ranks of a process set. One per optimizer."""

    def __init__(
        self,
        verbs: MxnetCollectives,
        spec: ReduceSpec,
        groups: Groups | None = None,
        prefix: str = "",
    ) -> None:
        """Ranks outside of ``spec.process_set`` keep their gradients. ``prefix``: begins names."""
        self.spec = spec
        self._verbs = verbs
        self._groups = groups
        self.prefix = prefix
        self._agreement = Agreement(verbs.world, spec.process_set)

    def is_member(self) -> bool:
        """Return whether this rank takes part. Raises NotInitializedError."""
        self._verbs.world()
        return self.spec.is_member

    def reduce_all(self, gradients: Sequence[Gradient]) -> None:
        """Overwrite the gradients of a whole model, the last first: backward makes them so.

        Each bucket is on its way as soon as MXNet has computed its gradients, while it computes
        those before. Raises MismatchError, on every rank, when ranks have other parameters. In an
        elastic job all of them are one step.
        """
        described = [(g.name, (g.arrays[0].shape, str(g.arrays[0].dtype))) for g in gradients]
        sizes = {i: _bytes(gradients[i].arrays[0]) for i in reversed(range(len(gradients)))}
        groups = self._groups.among(dict(enumerate(gradients))) if self._groups else None
        buckets = [
            ([gradients[i] for i in part], str(n)) for n, part in enumerate(plan.cut(sizes, groups))
        ]
        self._combine(buckets, described)

    def reduce(self, gradients: Sequence[Gradient]) -> None:
        """Overwrite some gradients, of which all ranks know that they come together."""
        names = [gradient.name for gradient in gradients]
        name = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
        self._combine([(gradients, name)], [])

    def _combine(
        self,
        buckets: Sequence[tuple[Sequence[Gradient], str]],
        described: list[tuple[str, Any]],
    ) -> None:
        if not self.is_member():
            if transaction().is_elastic:  # whose steps are those of all ranks
                transaction().run(lambda: None, counts=True)
            return
        for bucket, _ in buckets:
            for gradient in bucket:
                _add_up(gradient.arrays)

        def attempt() -> list[Callable[[], None]]:
            self._agree(described)
            pending = [self._start(*bucket) for bucket in buckets]
            return [wait() for wait in pending]

        for put in transaction().run(attempt, counts=True):
            put()

    def _agree(self, described: list[tuple[str, Any]]) -> None:
        """Find a number for this optimizer that it has on all ranks, once in each world."""
        if not self._agreement.is_current():
            self._agreement.reach(described)

    def _start(self, bucket: Sequence[Gradient], name: str) -> Callable[[], Callable[[], None]]:
        """Send a bucket, and return what waits for it.

        That again returns what puts the results where the gradients were. In an elastic job these
        stay as they are before, to be sent once more if a rank is lost.
        """
        sent = [(gradient.name, gradient.arrays[0]) for gradient in bucket]
        full_name = f"{self.prefix}gradients.{self._agreement.number}.{name}"
        submit = exchange.by(self._verbs, self.spec, in_place=not transaction().is_elastic)
        scaled = exchange.scaling(self._verbs, self.spec)
        wait = exchange.start(self.spec, full_name, sent, submit, scaled)

        def put(results: Sequence[mx.nd.NDArray]) -> None:
            for result, gradient in zip(results, bucket, strict=True):
                for array in gradient.arrays:
                    if array is not result:
                        result.copyto(array)

        return lambda: partial(put, wait())


def _add_up(arrays: list[mx.nd.NDArray]) -> None:
    """Put the sum over this rank's devices into the first."""
    for other in arrays[1:]:
        arrays[0][:] = arrays[0] + other.as_in_context(arrays[0].context)


def _bytes(array: mx.nd.NDArray) -> int:
    return array.size * np.dtype(array.dtype).itemsize  # type: ignore[no-any-return]


def groups_of(groups: Any) -> Groups:
    """Check ``groups``, what is to travel together: a number, or lists of parameters.

    Raises InvalidArgumentError for other values.
    """
    return Groups(groups, "parameters", lambda parameter: getattr(parameter, "name", None))


def spec_of(
    compression: AnyCompressor,
    op: int,
    gradient_predivide_factor: float,
    process_set: ProcessSet | None,
) -> ReduceSpec:
    """Check what an optimizer was given. Raises InvalidArgumentError for what cannot work."""
    if compression is Compression.bf16:
        raise FrontEndArgumentError("MXNet has no bfloat16: give Compression.none or .fp16")
    predivide = gradient_predivide_factor
    return ReduceSpec.checked(compression, op, predivide, process_set, (Average, Sum))

"""The derivatives of the verbs, in terms of other verbs, for all frameworks.

The gradient is that of the *sum of all ranks' losses* with respect to this rank's input: what
reached the output on every rank is added up and goes back the way it came. So the gradient of an
Average is an Average, that of a Sum a Sum. The table of verbs has, for each, the verb that carries
gradients back, and what is left to do then:

| verb          | gradients go by          | then                                                |
|---------------|--------------------------|-----------------------------------------------------|
| allreduce     | the same allreduce       |                                                     |
| broadcast     | allreduce with Sum       | zeros on all ranks but the root                     |
| allgather     | allreduce with Sum       | the rows that this rank had given                   |
| alltoall      | alltoall of the received | zeros for the rows that stayed here                 |
| reducescatter | allgather                | times the factors (Average: over the ranks, too)    |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kolovod.core.ops import Average, Op, Sum
from kolovod.core.submission import Request
from kolovod.core.verbs import VERBS, Then
from kolovod.errors import InvalidArgumentError

__all__ = ["Arithmetic", "Given", "backward_request", "finish", "need_linear", "scale_factor"]


class Given(NamedTuple):
    """Facts that a rank keeps of an operation until gradients come back; numbers, or tensors."""

    rank: Any
    """Position of this rank among those that took part."""
    size: Any
    rows: Sequence[Any] = ()
    """The first dimension of each tensor that this rank gave."""
    starts: Sequence[Any] = ()
    """For an allgather: for each tensor, the row of the result where this rank's rows begin."""
    received: Any = None
    """For an alltoall: the rows that each rank has sent here."""


class Arithmetic(Protocol):
    """The arithmetic that derivatives need from a framework besides verbs."""

    def zero_unless(self, rank: Any, root: int, tensor: Any) -> Any:
        """``tensor`` if ``rank`` is ``root``, else zeros like it."""
        ...

    def rows(self, tensor: Any, start: Any, count: Any) -> Any:
        """``count`` rows of ``tensor``, from row ``start`` on."""
        ...

    def padded(self, tensor: Any, rows: Any) -> Any:
        """``tensor`` with zeros behind it, so that it has so many ``rows``."""
        ...

    def scaled(self, tensor: Any, factor: float, divisor: Any) -> Any:
        """``tensor * factor``, divided by the ``divisor`` if there is one."""
        ...


def need_linear(request: Request) -> None:
    """Raise InvalidArgumentError if the operation has no derivative."""
    if request.verb.reduces and request.op not in (Average, Sum):
        raise InvalidArgumentError(
            f"{request.verb} with op {Op(request.op).name} has no gradient here; use Average or Sum"
        )


def backward_request(request: Request, received: Any = None) -> Request:
    """Return the request that carries the gradients of ``request`` back.

    Raises InvalidArgumentError if it has no gradients.
    """
    need_linear(request)
    adjoint = request.verb.adjoint
    assert adjoint is not None
    alike = adjoint.reduces_alike
    return Request(
        VERBS[adjoint.verb],
        None if request.name is None else f"{request.name}.backward",
        request.process_set,
        request.op if alike else Sum,
        request.prescale if alike else 1.0,
        request.postscale if alike else 1.0,
        splits=received,
        codecs=request.codecs if alike else (),
    )


def finish(
    request: Request, given: Given, results: Sequence[Any], arithmetic: Arithmetic
) -> list[Any]:
    """The gradients of the inputs, from the ``results`` of the backward request."""
    adjoint = request.verb.adjoint
    assert adjoint is not None
    then = adjoint.then
    if then is Then.ZERO_UNLESS_ROOT:
        return [arithmetic.zero_unless(given.rank, request.root, result) for result in results]
    if then is Then.TAKE_OWN_ROWS:
        rows = zip(results, given.starts, given.rows, strict=True)
        return [arithmetic.rows(result, start, count) for result, start, count in rows]
    if then is Then.PAD_WITH_ZEROS:
        pairs = zip(results, given.rows, strict=True)
        return [arithmetic.padded(result, count) for result, count in pairs]
    if then is Then.SCALE:
        factor, divisor = scale_factor(request, given.size)
        return [arithmetic.scaled(result, factor, divisor) for result in results]
    return list(results)


def scale_factor(request: Request, size: Any) -> tuple[float, Any]:
    """The factor, and the divisor (None: no), that a linear reduction has besides the sum."""
    return request.prescale * request.postscale, size if request.op == Average else None

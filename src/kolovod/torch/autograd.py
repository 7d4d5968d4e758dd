"""The verbs on tensors that want a gradient; kolovod/core/derivatives.py has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod.core.collectives import Collectives
from kolovod.core.derivatives import Given, backward_request, finish
from kolovod.core.submission import Request
from kolovod.core.verbs import ALLGATHER, ALLTOALL
from kolovod.torch.frontend import refuse_transformed


def _wants_grad(tensor: object) -> bool:
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


class Arithmetic:
    """The arithmetic that derivatives need of PyTorch (derivatives.Arithmetic)."""

    @staticmethod
    def zero_unless(rank: int, root: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if rank == root else torch.zeros_like(tensor)

    @staticmethod
    def rows(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
        return tensor[start : start + count]

    @staticmethod
    def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        missing = rows - tensor.shape[0]
        return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])

    @staticmethod
    def scaled(tensor: torch.Tensor, factor: float, divisor: int | None) -> torch.Tensor:
        return tensor.mul_(factor / (divisor or 1))


class _Verb(torch.autograd.Function):
    """Any verb that makes new tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        request: Request,
        told: list[list[list[int]]],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """``told`` gets the rows of ``Collectives.new_with_rows``."""
        results, rows = verbs.new_with_rows(request, tensors)
        told.append(rows)
        world = verbs.membership(request.process_set)
        own_rows = [tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]
        starts = [sum(each[: world.rank]) for each in rows] if request.verb is ALLGATHER else []
        received = rows[0] if request.verb is ALLTOALL else None
        ctx.call = verbs, request, Given(world.rank, world.size, own_rows, starts, received)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, request, given = ctx.call
        return None, None, None, *verbs.send_back(request, given, grads)


class TorchCollectives(Collectives):
    """The verbs on tensors; the blocking ones that make a new tensor can be differentiated.

    Reductions for Average and Sum only. In-place and asynchronous verbs see values only, and their
    results carry no history.
    """

    def new(self, request: Request, tensor: Any) -> Any:
        """Carry out ``request`` on one tensor, into a new one; autograd can go back through it."""
        if not _wants_grad(tensor):
            return super().new(request, tensor)
        ((result,), _) = self.new_with_rows(request, (tensor,))
        return result

    def new_with_rows(
        self, request: Request, tensors: Sequence[Any]
    ) -> tuple[list[Any], list[list[int]]]:
        """Carry out ``request`` as ``new`` does; return results and the rows of each rank."""
        if not any(map(_wants_grad, tensors)):
            return super().new_with_rows(request, tensors)
        for tensor in tensors:
            refuse_transformed(tensor)
        told: list[list[list[int]]] = []
        results = _Verb.apply(self, request, told, *tensors)  # type: ignore[no-untyped-call]
        return list(results), told[0]

    def send_back(
        self, request: Request, given: Given, grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The gradients of the inputs of ``request``, from those of its results."""
        results = self.new_group(backward_request(request, given.received), grads)
        return finish(request, given, results, Arithmetic())

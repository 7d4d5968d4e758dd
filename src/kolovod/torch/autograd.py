"""The verbs on tensors that want a gradient.

The gradient is that of the *sum of all ranks' losses* with respect to this rank's input: what
reached the output on every rank is added up and goes back the way it came. So the gradient of an
Average is an Average, that of a Sum a Sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod.collectives import Collectives
from kolovod.errors import InvalidArgumentError
from kolovod.ops import Average, Op, Sum

_LINEAR = (Average, Sum)


def _wants_grad(tensor: object) -> bool:
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, name, op, scales)
        return tuple(verbs.grouped_allreduce(tensors, name, op, *scales))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, op, scales = ctx.call
        if op not in _LINEAR:
            raise InvalidArgumentError(
                f"allreduce with op {Op(op).name} has no gradient here; use Average or Sum"
            )
        results = verbs.grouped_allreduce(grads, _backward_name(name), op, *scales)
        return (None, None, None, None, *results)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, verbs: TorchCollectives, name: str | None, root: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = (verbs, name, root)
        return verbs.broadcast(tensor, root, name)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, root = ctx.call
        total = verbs.allreduce(grads[0], _backward_name(name), Sum)
        if verbs.world().rank != root:
            total = torch.zeros_like(total)
        return None, None, None, total


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, verbs: TorchCollectives, name: str | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        result = verbs.allgather(tensor, name)
        rows = torch.tensor([tensor.shape[0]])
        counts = verbs.allgather(rows, None if name is None else f"{name}.rows").tolist()
        rank = verbs.world().rank
        ctx.call = (verbs, name, sum(counts[:rank]), counts[rank])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, start, rows = ctx.call
        total = verbs.allreduce(grads[0], _backward_name(name), Sum)
        return None, None, total[start : start + rows]


class TorchCollectives(Collectives[torch.Tensor]):
    """The verbs on tensors; the blocking ones that make a new tensor can be differentiated.

    In-place and asynchronous verbs see values only, and their results carry no history.
    """

    def allreduce(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> torch.Tensor:
        """See Collectives.allreduce. Differentiable for Average and Sum."""
        if _wants_grad(tensor):
            scales = (prescale_factor, postscale_factor)
            (result,) = _Allreduce.apply(self, name, op, scales, tensor)  # type: ignore[no-untyped-call]
            return result  # type: ignore[no-any-return]
        return super().allreduce(tensor, name, op, prescale_factor, postscale_factor)

    def grouped_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[torch.Tensor]:
        """See Collectives.grouped_allreduce. Differentiable for Average and Sum."""
        if isinstance(tensors, list | tuple) and any(map(_wants_grad, tensors)):
            scales = (prescale_factor, postscale_factor)
            return list(_Allreduce.apply(self, name, op, scales, *tensors))  # type: ignore[no-untyped-call]
        return super().grouped_allreduce(tensors, name, op, prescale_factor, postscale_factor)

    def broadcast(
        self, tensor: torch.Tensor, root_rank: int = 0, name: str | None = None
    ) -> torch.Tensor:
        """See Collectives.broadcast. Differentiable."""
        if _wants_grad(tensor):
            return _Broadcast.apply(self, name, root_rank, tensor)  # type: ignore
        return super().broadcast(tensor, root_rank, name)

    def allgather(self, tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        """See Collectives.allgather. Differentiable."""
        if _wants_grad(tensor):
            return _Allgather.apply(self, name, tensor)  # type: ignore
        return super().allgather(tensor, name)

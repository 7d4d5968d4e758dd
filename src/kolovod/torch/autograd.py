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
from kolovod.submission import Group

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
        process_set: Group | None,
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, process_set, name, op, scales)
        return tuple(verbs.grouped_allreduce(tensors, name, op, *scales, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, process_set, name, op, scales = ctx.call
        _need_linear("allreduce", op)
        results = verbs.grouped_allreduce(grads, _backward_name(name), op, *scales, process_set)
        return (None, None, None, None, None, *results)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        process_set: Group | None,
        name: str | None,
        root: int,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call = (verbs, process_set, name, root)
        return verbs.broadcast(tensor, root, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, process_set, name, root = ctx.call
        total = verbs.allreduce(grads[0], _backward_name(name), Sum, process_set=process_set)
        if verbs.world().rank != root:
            total = torch.zeros_like(total)
        return None, None, None, None, total


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        process_set: Group | None,
        name: str | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor([[tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]])
        *results, counts = verbs.grouped_allgather([*tensors, rows], name, process_set)
        rank = verbs.membership(process_set).rank
        ctx.call = (verbs, process_set, name, counts[:rank].sum(0).tolist(), rows[0].tolist())
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, process_set, name, starts, rows = ctx.call
        totals = verbs.grouped_allreduce(grads, _backward_name(name), Sum, process_set=process_set)
        own = (
            total[start : start + count]
            for total, start, count in zip(totals, starts, rows, strict=True)
        )
        return (None, None, None, *own)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        process_set: Group | None,
        name: str | None,
        splits: Sequence[int] | None,
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, list[int]]:
        result, received = verbs.alltoall(tensor, splits, name, process_set)
        ctx.call = (verbs, process_set, name, received, tensor.shape)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, process_set, name, received, shape = ctx.call
        sent, _ = verbs.alltoall(grads[0], received, _backward_name(name), process_set)
        kept = sent.new_zeros((shape[0] - sent.shape[0], *shape[1:]))  # rows that stayed here
        return None, None, None, None, torch.cat([sent, kept])


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        process_set: Group | None,
        name: str | None,
        op: int,
        scales: tuple[float, float],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, process_set, name, op, scales)
        return tuple(verbs.grouped_reducescatter(tensors, name, op, *scales, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, process_set, name, op, (prescale, postscale) = ctx.call
        _need_linear("reducescatter", op)
        factor = prescale * postscale / (verbs.membership(process_set).size if op == Average else 1)
        results = verbs.grouped_allgather(grads, _backward_name(name), process_set)
        return (None, None, None, None, None, *(result.mul_(factor) for result in results))


def _need_linear(verb: str, op: int) -> None:
    if op not in _LINEAR:
        raise InvalidArgumentError(
            f"{verb} with op {Op(op).name} has no gradient here; use Average or Sum"
        )


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
        process_set: Group | None = None,
    ) -> torch.Tensor:
        """See Collectives.allreduce. Differentiable for Average and Sum."""
        if _wants_grad(tensor):
            scales = (prescale_factor, postscale_factor)
            (result,) = _Allreduce.apply(self, process_set, name, op, scales, tensor)  # type: ignore[no-untyped-call]
            return result  # type: ignore[no-any-return]
        return super().allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)

    def grouped_allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[torch.Tensor]:
        """See Collectives.grouped_allreduce. Differentiable for Average and Sum."""
        if isinstance(tensors, list | tuple) and any(map(_wants_grad, tensors)):
            scales = (prescale_factor, postscale_factor)
            return list(_Allreduce.apply(self, process_set, name, op, scales, *tensors))  # type: ignore[no-untyped-call]
        return super().grouped_allreduce(
            tensors, name, op, prescale_factor, postscale_factor, process_set
        )

    def broadcast(
        self,
        tensor: torch.Tensor,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> torch.Tensor:
        """See Collectives.broadcast. Differentiable."""
        if _wants_grad(tensor):
            return _Broadcast.apply(self, process_set, name, root_rank, tensor)  # type: ignore
        return super().broadcast(tensor, root_rank, name, process_set)

    def allgather(
        self, tensor: torch.Tensor, name: str | None = None, process_set: Group | None = None
    ) -> torch.Tensor:
        """See Collectives.allgather. Differentiable."""
        if _wants_grad(tensor):
            (result,) = _Allgather.apply(self, process_set, name, tensor)  # type: ignore[no-untyped-call]
            return result  # type: ignore[no-any-return]
        return super().allgather(tensor, name, process_set)

    def grouped_allgather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None = None,
        process_set: Group | None = None,
    ) -> list[torch.Tensor]:
        """See Collectives.grouped_allgather. Differentiable."""
        if isinstance(tensors, list | tuple) and any(map(_wants_grad, tensors)):
            return list(_Allgather.apply(self, process_set, name, *tensors))  # type: ignore[no-untyped-call]
        return super().grouped_allgather(tensors, name, process_set)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """See Collectives.alltoall. Differentiable."""
        if _wants_grad(tensor):
            return _Alltoall.apply(self, process_set, name, splits, tensor)  # type: ignore
        return super().alltoall(tensor, splits, name, process_set)

    def reducescatter(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> torch.Tensor:
        """See Collectives.reducescatter. Differentiable for Average and Sum."""
        if _wants_grad(tensor):
            scales = (prescale_factor, postscale_factor)
            (result,) = _Reducescatter.apply(self, process_set, name, op, scales, tensor)  # type: ignore[no-untyped-call]
            return result  # type: ignore[no-any-return]
        return super().reducescatter(
            tensor, name, op, prescale_factor, postscale_factor, process_set
        )

    def grouped_reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None = None,
        op: int = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Group | None = None,
    ) -> list[torch.Tensor]:
        """See Collectives.grouped_reducescatter. Differentiable for Average and Sum."""
        if isinstance(tensors, list | tuple) and any(map(_wants_grad, tensors)):
            scales = (prescale_factor, postscale_factor)
            return list(_Reducescatter.apply(self, process_set, name, op, scales, *tensors))  # type: ignore[no-untyped-call]
        return super().grouped_reducescatter(
            tensors, name, op, prescale_factor, postscale_factor, process_set
        )

"""The verbs on tensors that want a gradient.

The gradient is that of the *sum of all ranks' losses* with respect to this rank's input: what
reached the output on every rank is added up and goes back the way it came. So the gradient of an
Average is an Average, that of a Sum a Sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kolovod.core.collectives import Collectives
from kolovod.core.ops import Average, Op, Sum
from kolovod.core.submission import Group
from kolovod.errors import InvalidArgumentError

_LINEAR = (Average, Sum)


def _wants_grad(tensor: object) -> bool:
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


# Each takes the verbs, what a verb is given after its tensors, and the tensors.


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        arguments: tuple[str | None, int, float, float, Group | None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, *arguments)
        return tuple(verbs.grouped_allreduce(tensors, *arguments))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, op, *further = ctx.call
        _need_linear("allreduce", op)
        return None, None, *verbs.grouped_allreduce(grads, _backward_name(name), op, *further)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        arguments: tuple[int, str | None, Group | None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, *arguments)
        return tuple(verbs.broadcast(tensor, *arguments) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, root, name, process_set = ctx.call
        total = verbs.allreduce(grads[0], _backward_name(name), Sum, process_set=process_set)
        if verbs.world().rank != root:
            total = torch.zeros_like(total)
        return None, None, total


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        arguments: tuple[str | None, Group | None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor(
            [[tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]],
            device=tensors[0].device,
        )
        *results, counts = verbs.grouped_allgather([*tensors, rows], *arguments)
        rank = verbs.membership(arguments[-1]).rank
        ctx.call = (verbs, *arguments, counts[:rank].sum(0).tolist(), rows[0].tolist())
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, process_set, starts, rows = ctx.call
        totals = verbs.grouped_allreduce(grads, _backward_name(name), Sum, process_set=process_set)
        own = (
            total[start : start + count]
            for total, start, count in zip(totals, starts, rows, strict=True)
        )
        return (None, None, *own)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        arguments: tuple[Sequence[int] | None, str | None, Group | None],
        tensor: torch.Tensor,
    ) -> tuple[torch.Tensor, list[int]]:
        result, received = verbs.alltoall(tensor, *arguments)
        ctx.call = (verbs, *arguments[1:], received, tensor.shape)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, process_set, received, shape = ctx.call
        sent, _ = verbs.alltoall(grads[0], received, _backward_name(name), process_set)
        kept = sent.new_zeros((shape[0] - sent.shape[0], *shape[1:]))  # rows that stayed here
        return None, None, torch.cat([sent, kept])


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: TorchCollectives,
        arguments: tuple[str | None, int, float, float, Group | None],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = (verbs, *arguments)
        return tuple(verbs.grouped_reducescatter(tensors, *arguments))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        verbs, name, op, prescale, postscale, process_set = ctx.call
        _need_linear("reducescatter", op)
        factor = prescale * postscale / (verbs.membership(process_set).size if op == Average else 1)
        results = verbs.grouped_allgather(grads, _backward_name(name), process_set)
        return (None, None, *(result.mul_(factor) for result in results))


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
        arguments = (name, op, prescale_factor, postscale_factor, process_set)
        return self._one(_Allreduce, super().allreduce, tensor, *arguments)

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
        arguments = (name, op, prescale_factor, postscale_factor, process_set)
        return self._several(_Allreduce, super().grouped_allreduce, tensors, *arguments)

    def broadcast(
        self,
        tensor: torch.Tensor,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> torch.Tensor:
        """See Collectives.broadcast. Differentiable."""
        return self._one(_Broadcast, super().broadcast, tensor, root_rank, name, process_set)

    def allgather(
        self, tensor: torch.Tensor, name: str | None = None, process_set: Group | None = None
    ) -> torch.Tensor:
        """See Collectives.allgather. Differentiable."""
        return self._one(_Allgather, super().allgather, tensor, name, process_set)

    def grouped_allgather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None = None,
        process_set: Group | None = None,
    ) -> list[torch.Tensor]:
        """See Collectives.grouped_allgather. Differentiable."""
        return self._several(_Allgather, super().grouped_allgather, tensors, name, process_set)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """See Collectives.alltoall. Differentiable."""
        if _wants_grad(tensor):
            return _Alltoall.apply(self, (splits, name, process_set), tensor)  # type: ignore
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
        arguments = (name, op, prescale_factor, postscale_factor, process_set)
        return self._one(_Reducescatter, super().reducescatter, tensor, *arguments)

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
        arguments = (name, op, prescale_factor, postscale_factor, process_set)
        return self._several(_Reducescatter, super().grouped_reducescatter, tensors, *arguments)

    def _one(
        self,
        function: type[torch.autograd.Function],
        plain: Callable[..., torch.Tensor],
        tensor: torch.Tensor,
        *arguments: Any,
    ) -> torch.Tensor:
        """``plain(tensor, *arguments)``, by way of ``function`` if that needs a gradient."""
        if not _wants_grad(tensor):
            return plain(tensor, *arguments)
        (result,) = function.apply(self, arguments, tensor)  # type: ignore[no-untyped-call]
        return result  # type: ignore[no-any-return]

    def _several(
        self,
        function: type[torch.autograd.Function],
        plain: Callable[..., list[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        *arguments: Any,
    ) -> list[torch.Tensor]:
        """The same for a group."""
        if not (isinstance(tensors, list | tuple) and any(map(_wants_grad, tensors))):
            return plain(tensors, *arguments)
        return list(function.apply(self, arguments, *tensors))  # type: ignore[no-untyped-call]

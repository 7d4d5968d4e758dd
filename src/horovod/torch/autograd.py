"""The verbs as autograd functions, with Horovod's gradients.

They are those of the *mean* of the ranks' losses where Kolovod's are of their sum (broadcast,
allgather; for reducescatter with Sum they are multiplied by the number of ranks), and Min, Max and
Product hand the gradient through the same operation. Scripts have been tuned with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod.core.collectives import Collectives
from kolovod.core.ops import Average, Sum
from kolovod.core.world import current
from kolovod.torch.frontend import TorchFrontend

plain: Collectives = Collectives(TorchFrontend(), current)
"""The verbs on values only."""


class HorovodAllreduce(torch.autograd.Function):
    """(tensor, name, op, prescale, postscale, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments
        return plain.allreduce(tensor, name, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return plain.allreduce(grad, None, *ctx.arguments), *[None] * 5


class HorovodGroupedAllreduce(torch.autograd.Function):
    """(name, op, prescale, postscale, process_set, *tensors)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        ctx.arguments = given[1:5]
        return tuple(plain.grouped_allreduce(given[5:], *given[:5]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return *[None] * 5, *plain.grouped_allreduce(grads, None, *ctx.arguments)


class HorovodAllgather(torch.autograd.Function):
    """(tensor, name, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, group: Any) -> torch.Tensor:
        (result,) = _gather(ctx, [tensor], name, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *_own_rows(ctx, [grad]), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    """(name, process_set, *tensors)."""

    @staticmethod
    def forward(ctx: Any, name: str | None, group: Any, *tensors: torch.Tensor) -> Any:
        return tuple(_gather(ctx, tensors, name, group))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_own_rows(ctx, grads)


def _gather(
    ctx: Any, tensors: Sequence[torch.Tensor], name: str | None, group: Any
) -> list[torch.Tensor]:
    rows = torch.tensor(
        [[tensor.shape[0] if tensor.ndim else 0 for tensor in tensors]], device=tensors[0].device
    )
    *results, counts = plain.grouped_allgather([*tensors, rows], name, group)
    before = counts[: plain.membership(group).rank].sum(0).tolist()
    ctx.call = group, before, rows[0].tolist()
    return results


def _own_rows(ctx: Any, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    group, starts, rows = ctx.call
    means = plain.grouped_allreduce(grads, None, Average, process_set=group)
    return [
        mean[start : start + count] for mean, start, count in zip(means, starts, rows, strict=True)
    ]


class HorovodBroadcast(torch.autograd.Function):
    """(tensor, root_rank, name, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, group: Any) -> Any:
        ctx.call = root, group
        return plain.broadcast(tensor, root, name, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        root, group = ctx.call
        mean = plain.allreduce(grad, None, Average, process_set=group)
        if current().rank != root:
            mean.zero_()
        return mean, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    """(tensor, splits, name, process_set) -> tensor, received splits (int32)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, group: Any) -> Any:
        result, received = plain.alltoall(tensor, splits, name, group)
        ctx.call = received, group, tensor.shape
        counts = torch.tensor(received, dtype=torch.int32)
        ctx.mark_non_differentiable(counts)
        return result, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        received, group, shape = ctx.call
        sent, _ = plain.alltoall(grad, received, None, group)
        kept = sent.new_zeros((shape[0] - sent.shape[0], *shape[1:]))  # rows that stayed here
        return torch.cat([sent, kept]), None, None, None


class HorovodReducescatter(torch.autograd.Function):
    """(tensor, name, op, prescale, postscale, process_set)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        ctx.arguments = arguments[1:]
        return plain.reducescatter(tensor, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return *_gathered(ctx.arguments, [grad]), *[None] * 5


class HorovodGroupedReducescatter(torch.autograd.Function):
    """(name, op, prescale, postscale, process_set, *tensors)."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, ...]:
        ctx.arguments = given[1:5]
        return tuple(plain.grouped_reducescatter(given[5:], *given[:5]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return *[None] * 5, *_gathered(ctx.arguments, grads)


def _gathered(
    arguments: tuple[int, float, float, Any], grads: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    op, prescale, postscale, group = arguments
    factor = prescale * postscale * (plain.membership(group).size if op == Sum else 1)
    return [result * factor for result in plain.grouped_allgather(grads, None, group)]

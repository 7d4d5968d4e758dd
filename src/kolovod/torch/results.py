"""Gradients that come back: a check that nobody changed them meanwhile, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kolovod import _native
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError
from kolovod.torch.buckets import Buckets, Item
from kolovod.torch.parameters import Parameters
from kolovod.torch.spare import Spare


def changed(parameters: Parameters, buckets: Buckets) -> InvalidArgumentError | None:
    """Return an error if a gradient was changed, or replaced, since it was sent; else None.

    Nobody but hooks within backward can do that. What was sent is not this rank's gradient any
    more, so the change cannot be made good.
    """
    for bucket in buckets.all:
        if not bucket.is_sent:
            continue
        place = _native.first_changed(parameters.tensors, bucket.items)
        if place is not None:
            name = parameters.names[bucket.items[place][0]]
            return FrontEndArgumentError(
                f"the gradient of '{name}' was changed within backward while it was on its way to "
                "the other ranks: change it in a hook of the tensor (Tensor.register_hook), or "
                "register the hook before DistributedOptimizer is made"
            )
    return None


@torch.no_grad()
def store(
    tensors: Sequence[torch.Tensor],
    done: Sequence[Item],
    is_used: Callable[[int], bool],
    scale_of_sum: float,
    spare: Spare,
) -> None:
    """Put results where the optimizer looks for them [5]; ``spare`` gets memory that is left over.

    ``is_used(index)``: a parameter that no rank has used keeps no gradient, as with one process.
    """
    for index, own, _, grad, encoded in done:
        if encoded is not None:
            result = encoded.opened(scale_of_sum)
            if result.is_sparse or grad.is_sparse:
                if grad.is_sparse and not result.is_sparse:  # and sent as dense
                    result = result.to_sparse(grad.sparse_dim())
                tensors[index].grad = result if own is not None or is_used(index) else None
                continue
            if result is not grad:
                grad.copy_(result)
        elif own is not None and own is not grad:
            spare.keep(index, _take(own, grad))
        if own is None and is_used(index):
            tensors[index].grad = grad


def _take(own: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Let ``own`` have the result's values: its memory, too, unless others see ``own``'s.

    Returns what is left over.
    """
    if own._is_view():
        own.copy_(result)
        return result
    left = own.data
    own.data = result
    return left

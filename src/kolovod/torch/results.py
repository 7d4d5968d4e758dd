"""Gradients that come back: whether they were changed meanwhile, and where they belong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kolovod.errors import InvalidArgumentError
from kolovod.torch.buckets import Buckets, Item
from kolovod.torch.countdown import Countdown
from kolovod.torch.parameters import Parameters
from kolovod.torch.spare import Spare


def looked_at(
    parameters: Parameters, buckets: Buckets, countdown: Countdown
) -> tuple[bool, InvalidArgumentError | None]:
    """Were the gradients thrown away since they were sent? And what is wrong with changed ones.

    What was sent is not this rank's gradient any more, so a change to it cannot be made good.
    """
    left, tensors = countdown.numbers, parameters.tensors
    redo = min(left, default=0) < 0  # a gradient is a second one: see Hooks
    kept = changed = None
    for bucket in buckets.all:
        for index, own, version, _, _ in bucket.items:
            now = tensors[index].grad
            if now is own:
                if own is None or own._version == version:
                    continue
                changed = changed or f"'{parameters.names[index]}'"
            elif now is not None and left[index] >= 0:
                changed = changed or f"'{parameters.names[index]}'"
            elif bucket.is_sent:
                redo = True
    if redo:
        sent = (item for bucket in buckets.all if bucket.is_sent for item in bucket.items)
        for index, own, *_ in sent:
            if own is not None and own is tensors[index].grad:
                kept = f"'{parameters.names[index]}'"
    if changed:
        return redo, InvalidArgumentError(
            f"the gradient of {changed} was changed while it was on its way "
            "to the other ranks: call optimizer.synchronize() after backward(), then change "
            "it, then step within optimizer.skip_synchronize()"
        )
    if kept:
        return redo, InvalidArgumentError(
            f"gradients were thrown away, but not that of {kept}, which is "
            "on its way to the other ranks: use optimizer.zero_grad()"
        )
    return redo, None


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
    for index, own, _, grad, parcel in done:
        if parcel is not None:
            result = parcel.opened(scale_of_sum)
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

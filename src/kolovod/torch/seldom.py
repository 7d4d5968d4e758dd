"""What training with seldom communication has in common in PyTorch: parameters and the warm-up.

``local_sgd.py`` and ``diloco.py`` are the two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kolovod.errors import InvalidArgumentError
from kolovod.gradients import seldom

Named = Sequence[tuple[str, torch.Tensor]]


class Exchange(seldom.Exchange):
    """Of parameters and gradients of PyTorch's."""

    def agree(self, details: seldom.Details, parameters: Named, *, are_equal: bool = True) -> None:
        """Once in each world: all ranks have the same, and the same values if these ``are_equal``.

        Raises what ``agree_once`` raises.
        """

        def mine() -> seldom.Details:
            described = [(name, (tuple(p.shape), str(p.dtype))) for name, p in parameters]
            compared = parameters if are_equal else ()
            values = [(f"the values of {name}", _checksum(p)) for name, p in compared]
            return [*details, *described, *values]

        self.agree_once(mine)

    def before_step(self, agree: Callable[[], None], parameters: Named, *, warms_up: bool) -> None:
        """What an optimizer's step begins with: agree, and in the warm-up average gradients."""
        if not self.has_others:
            return
        agree()
        if warms_up:
            self._average_gradients(parameters)

    def _average_gradients(self, parameters: Named) -> None:
        """Each parameter's gradient is the ranks' mean; of one that has none it counts as zeros."""
        gradients = [
            (name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in parameters
        ]
        means = self.start("gradients", gradients, is_compressed=False)()
        for (_, parameter), mean in zip(parameters, means, strict=True):
            parameter.grad = mean


def parameters_of(model: torch.nn.Module) -> Named:
    """Those that are trained. Raises InvalidArgumentError for what is no model, or has none."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise InvalidArgumentError("the model has no parameter that is trained")
    return found


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those that are averaged: running statistics, which are floats."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def check_optimizer(label: str, optimizer: Any) -> None:
    """Raise InvalidArgumentError, which calls it ``label``, for what is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{label} is a {type(optimizer).__name__}: give a torch.optim.Optimizer"
        )


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return seldom.checksum(flat.view(torch.uint8).numpy())

"""Parameters of which this rank has a part: those of a model that ``fully_shard`` has sharded.

They are DTensors, with operations of their own among the ranks that share them. What is exchanged
with ranks that have the same part is the part itself, a plain tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kolovod.private_apis.torch import returns_plain_tensors

__all__ = ["Part", "is_sharded", "local_of", "meshes", "part_of", "sharded_like", "whole_of"]


def is_sharded(value: Any) -> bool:
    """Return whether ``value`` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, the same memory; a plain tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def sharded_like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """The DTensor that has ``local`` here, sharded over the same ranks as ``whole``."""
    result: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return result


class Part(torch.Tensor):
    """A rank's part of a parameter: a view, whose gradient is that part of the gradient."""

    whole: Any

    # Results are plain tensors.
    __torch_function__ = returns_plain_tensors

    @staticmethod
    def of(whole: torch.Tensor) -> Part:
        """Return this rank's part of ``whole``, a DTensor."""
        part: Part = torch.Tensor._make_subclass(Part, local_of(whole).detach())
        part.whole = whole
        return part

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """True if the parameter requires a gradient."""
        return bool(self.whole.requires_grad)

    @property
    def grad(self) -> torch.Tensor | None:
        """The part of the gradient on this rank: one tensor as long as the gradient is the same."""
        whole: torch.Tensor | None = self.whole.grad
        return None if whole is None else local_of(whole)

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        self.whole.grad = None if local is None else sharded_like(self.whole, local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Register ``hook`` with the parameter; it is called with the part."""
        return self.whole.register_post_accumulate_grad_hook(lambda _: hook(self))


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part that this rank exchanges for it; ``parameter`` itself if not sharded."""
    return Part.of(parameter) if is_sharded(parameter) else parameter


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter of which ``tensor`` is a part, or ``tensor``."""
    return tensor.whole if isinstance(tensor, Part) else tensor


def meshes(value: torch.nn.Module | torch.optim.Optimizer) -> list[Any]:
    """The device mesh of each sharded parameter."""
    tensors: Iterable[torch.Tensor]
    if isinstance(value, torch.nn.Module):
        tensors = value.parameters()
    else:
        tensors = (tensor for group in value.param_groups for tensor in group["params"])
    return [tensor.device_mesh for tensor in tensors if is_sharded(tensor)]  # type: ignore[attr-defined]

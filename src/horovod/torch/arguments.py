"""What Horovod's verbs on PyTorch tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.torch.autograd import group_of
from kolovod.errors import InvalidArgumentError

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


def named(verb: str, name: str | None) -> str | None:
    """Different verbs may use one name at the same time."""
    return None if name is None else f"{verb}.{name}"


def given(
    verb: str, name: str | None, op: int, prescale: float, postscale: float, process_set: Any
) -> tuple[str | None, int, float, float, Any]:
    """What Kolovod's reductions take after their tensors."""
    return named(verb, name), op, prescale, postscale, group_of(process_set)


def several(tensors: Any) -> Tensors:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise InvalidArgumentError(f"give a list of tensors, at least one, not {tensors!r}")
    return tensors

"""The arguments that Horovod's verbs on PyTorch tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.arguments import check_adasum, named
from horovod.common.process_sets import group_of
from horovod.torch.autograd import plain
from kolovod.errors import FrontEndArgumentError

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


def given(
    verb: str, name: str | None, op: int, prescale: float, postscale: float, process_set: Any
) -> tuple[str | None, int, float, float, Any]:
    """Return the arguments that Kolovod's reductions take after their tensors."""
    group = group_of(process_set)
    if verb.endswith("allreduce"):  # others refuse Adasum for any size
        check_adasum(op, group, plain)
    return named(verb, name), op, prescale, postscale, group


def several(tensors: Any) -> Tensors:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise FrontEndArgumentError(f"give a list of tensors, at least one, not {tensors!r}")
    return tensors

"""The arguments that Horovod's verbs on PyTorch tensors share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.arguments import named
from horovod.common.basics import Adasum
from horovod.common.process_sets import group_of
from horovod.common.util import num_rank_is_power_2
from horovod.torch.autograd import plain
from kolovod.errors import FrontEndArgumentError

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


def given(
    verb: str, name: str | None, op: int, prescale: float, postscale: float, process_set: Any
) -> tuple[str | None, int, float, float, Any]:
    """Return the arguments that Kolovod's reductions take after their tensors."""
    group = group_of(process_set)
    if op == Adasum and verb.endswith("allreduce"):  # others refuse it for any size
        check_adasum(plain.membership(group).size)
    return named(verb, name), op, prescale, postscale, group


def check_adasum(size: int) -> None:
    """Raise NotImplementedError, as Horovod does, if Adasum cannot do with so many ranks."""
    if not num_rank_is_power_2(size):
        raise NotImplementedError(
            f"op Adasum combines ranks in pairs of pairs: it needs 2, 4, 8, ... ranks, not {size}; "
            "use Average"
        )


def several(tensors: Any) -> Tensors:
    if not isinstance(tensors, list | tuple) or not tensors:
        raise FrontEndArgumentError(f"give a list of tensors, at least one, not {tensors!r}")
    return tensors

"""Horovod's DistributedOptimizer: Kolovod's, with Horovod's order of arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch

from horovod.common.arguments import check_adasum, groups_of
from horovod.common.basics import Adasum, Average
from horovod.common.process_sets import global_process_set, group_of
from horovod.torch.autograd import plain
from horovod.torch.compression import Compression
from horovod.torch.gradient_sender import add_gradient_sender
from kolovod.gradients.spec import is_elastic
from kolovod.torch import DistributedOptimizer as _distributed
from kolovod.torch.distributed import Distributed as _DistributedOptimizer

__all__ = ["DistributedOptimizer", "_DistributedOptimizer"]

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


def DistributedOptimizer(
    optimizer: O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
) -> O:
    """Make ``optimizer`` step with the gradients of all ranks; see kolovod.torch.

    ``num_groups`` is Horovod's older name of ``groups``. Raises ValueError for arguments that
    cannot work, NotImplementedError for Adasum within a process set, or if the number of ranks is
    no power of two.
    """
    groups = groups_of(num_groups, groups)
    process_set = group_of(process_set)
    if op == Adasum and process_set is not None:  # as in Horovod; ranks outside could not step
        raise NotImplementedError("op Adasum is possible among all ranks only, not a process set")
    if not is_elastic():  # else each step asks how many there are
        check_adasum(op, process_set, plain)
    named = None if named_parameters is None else list(named_parameters)
    distributed = _distributed(
        optimizer,
        named,
        compression,
        backward_passes_per_step,
        op,
        process_set,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
    )
    # Kept beside what Kolovod knows: extensions of Horovod look up here what a parameter is called.
    distributed._parameter_names = _names(distributed, named)  # type: ignore[attr-defined]
    if isinstance(distributed, _DistributedOptimizer):
        factor = gradient_predivide_factor
        add_gradient_sender(distributed, compression, op, factor, sparse_as_dense, process_set)
    return distributed


def _names(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """The name of each parameter, in the order of names; places stand for names not given."""
    if named is None:
        named = [
            (f"allreduce.noname.{group}.{i}", parameter)
            for group, options in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(options["params"])
        ]
    return {parameter: name for name, parameter in sorted(named, key=lambda pair: pair[0])}

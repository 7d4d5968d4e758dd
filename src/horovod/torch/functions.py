"""Horovod's helpers for starting equal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod.common.process_sets import global_process_set, group_of
from kolovod.errors import InvalidArgumentError
from kolovod.torch import allgather_object as _allgather_object
from kolovod.torch import broadcast_object as _broadcast_object
from kolovod.torch import broadcast_optimizer_state as _broadcast_optimizer_state
from kolovod.torch import broadcast_parameters as _broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite ``params`` (a dict, or a list of tensors or (name, tensor)) with the root's.

    Raises ValueError for others; a generator such as ``model.named_parameters()`` is taken, too.
    """
    if isinstance(params, list | tuple) and not all(isinstance(p, tuple) for p in params):
        params = [p if isinstance(p, tuple) else (str(i), p) for i, p in enumerate(params)]
    elif not isinstance(params, dict | Iterable) or isinstance(params, str):
        raise InvalidArgumentError(f"invalid params of type: {type(params)}")
    _broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give ``optimizer`` the root's state and options; no step is taken, ``model`` is not needed.

    Raises ValueError for LBFGS, whose state is not one of tensors alone.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgumentError("the state of torch.optim.LBFGS cannot be broadcast")
    _broadcast_optimizer_state(optimizer, root_rank)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """The root's ``obj``, on every rank."""
    return _broadcast_object(obj, root_rank, name, group_of(process_set))


def allgather_object(
    obj: Any, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Every rank's ``obj``, in rank order."""
    return _allgather_object(obj, name, group_of(process_set))

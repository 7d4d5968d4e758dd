"""Horovod's helpers for starting equal."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from horovod.common.process_sets import global_process_set, group_of
from kolovod.errors import FrontEndArgumentError
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
        raise FrontEndArgumentError(f"invalid params of type: {type(params)}")
    _broadcast_parameters(params, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give ``optimizer`` the root's state and options; no step is taken.

    Where there was no state, parameters that want a gradient and have none get one of zeros. That
    of an embedding with ``sparse=True`` is sparse, if the ``model`` is given where it can be found.
    Raises ValueError for LBFGS, whose state is not one of tensors alone.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise FrontEndArgumentError("the state of torch.optim.LBFGS cannot be broadcast")
    is_new = not optimizer.state
    _broadcast_optimizer_state(optimizer, root_rank)
    if is_new:
        _leave_zeros(optimizer, model)


def _leave_zeros(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Leave gradients of zeros, as Horovod does: scripts look at gradients before backward.

    The first backward finds them gone, unless they have been changed: added to dense zeros the
    gradient of an embedding that nobody told us of would not be sparse.
    """
    sparse = {
        id(module.weight)
        for module in ([] if model is None else model.modules())
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    takes_sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            if takes_sparse_only or id(parameter) in sparse:
                zeros = zeros.to_sparse(1)
            parameter.grad = zeros
            _have_make_way(parameter)


def _have_make_way(parameter: torch.Tensor) -> None:
    """Have the gradient of ``parameter`` go before the next one comes, if it is as it was."""
    assert parameter.grad is not None
    parameter.grad._horovod_version = parameter.grad._version  # type: ignore[attr-defined]
    own = weakref.ref(parameter)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def make_way(_: torch.Tensor) -> None:
        handle.remove()
        parameter = own()
        grad = None if parameter is None else parameter.grad
        if grad is not None and getattr(grad, "_horovod_version", -1) == grad._version:
            assert parameter is not None
            parameter.grad = None

    handle = parameter.register_hook(make_way)  # type: ignore[no-untyped-call]


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

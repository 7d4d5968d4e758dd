"""Copies of nested dictionaries and lists with tensors, made into the memory of earlier ones."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["copied", "fits"]


def copied(value: Any, into: Any = None) -> Any:
    """A copy of ``value`` that shares nothing with it.

    ``into``: an earlier copy; its tensors that have the same shape, dtype and device are
    overwritten, and are part of the result.
    """
    if isinstance(value, torch.Tensor):
        if _is_alike(value, into):
            with torch.no_grad():
                return into.copy_(value)
        return value.detach().clone()
    if isinstance(value, dict):
        before = into if isinstance(into, dict) else {}
        return {key: copied(item, before.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        old = into if type(into) is type(value) and len(into) == len(value) else [None] * len(value)
        return type(value)(map(copied, value, old))
    return copy.deepcopy(value)


def fits(value: Any, into: Any) -> bool:
    """Return whether all tensors of ``value`` have a place in ``into``, and nothing else has."""
    if isinstance(value, torch.Tensor):
        return _is_alike(value, into)
    if isinstance(value, dict):
        return (
            isinstance(into, dict)
            and value.keys() == into.keys()
            and all(fits(item, into[key]) for key, item in value.items())
        )
    return not isinstance(into, torch.Tensor | dict)


def _is_alike(tensor: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and (tensor.shape, tensor.dtype, tensor.device, tensor.layout)
        == (other.shape, other.dtype, other.device, other.layout)
        and not tensor.is_sparse
        and other.data_ptr() != tensor.data_ptr()
    )

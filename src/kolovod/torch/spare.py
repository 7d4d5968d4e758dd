"""Memory for results, where gradients must stay as they are until all ranks have a step's results.

A result takes the place of its gradient without a copy, so the gradient's memory is left over: the
next step's result gets it. New memory for each step costs more than the exchange itself.
"""

from __future__ import annotations

import torch

from kolovod.private_apis.torch import references_to_storage

__all__ = ["Spare"]

_ONLY_HERE = 2
"""References to memory that one tensor has: the tensor's, and that of who counts."""


class Spare:
    """Spare memory of one optimizer, by the index of its parameters."""

    def __init__(self) -> None:
        self._by_index: dict[int, torch.Tensor] = {}

    def take(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for the result of ``like``, which is contiguous; what it holds does not matter."""
        found = self._by_index.pop(index, None)
        if found is not None and (found.shape, found.dtype) == (like.shape, like.dtype):
            return found
        return torch.empty_like(like)

    def keep(self, index: int, left: torch.Tensor) -> None:
        """Keep ``left``, which is used no more, unless somebody else holds its memory as well."""
        if references_to_storage is None or not left.is_contiguous() or left.storage_offset() != 0:
            return
        storage = left.untyped_storage()
        if references_to_storage(storage._cdata) == _ONLY_HERE:
            self._by_index[index] = left

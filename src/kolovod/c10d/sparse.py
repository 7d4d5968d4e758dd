"""all_reduce of sparse tensors: all ranks' indices and values are gathered, and added up here."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from kolovod import _native
from kolovod.c10d.flat import Flat
from kolovod.core.submission import EngineTensor
from kolovod.errors import GroupArgumentError

__all__ = ["Parts", "add_up"]


class Parts:
    """The parts of a sparse tensor of this rank: its shape, its indices and its values.

    Raises InvalidArgumentError for what the engine cannot reach.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor`` is as it is, coalesced or not."""
        self.tensor = tensor
        dense = tensor.detach().coalesce()
        self.count = dense._nnz()
        shape = torch.tensor([[dense.sparse_dim(), *dense.shape]])
        self.dense_shape = dense.shape[dense.sparse_dim() :]
        self.indices = dense.indices().t().contiguous()
        self.values = dense.values()
        self.flats = [
            Flat(part, moves_only=True) for part in (shape, self.indices, self.values.contiguous())
        ]

    def tensors_to_gather(self) -> list[EngineTensor]:
        """Return the tensors of an allgather: rows of numbers, of the shape, indices and values."""
        shape, indices, values = self.flats
        width = prod(self.dense_shape) * (self.values.element_size() // values.itemsize)
        return [
            (shape.code, (1, shape.count), shape.address, 0),
            (indices.code, (self.count, self.indices.shape[1]), indices.address, 0),
            (values.code, (self.count, width), values.address, 0),
        ]


def add_up(engine: _native.Engine, number: int, tensors: Sequence[Parts]) -> None:
    """Put into each tensor, coalesced, the sum of what has been gathered in operation ``number``.

    Raises InvalidArgumentError if the tensor has another shape on another rank.
    """
    for i, parts in enumerate(tensors):
        shapes, indices, values = (
            _gathered(engine, number, 3 * i + k, flat) for k, flat in enumerate(parts.flats)
        )
        mine = parts.flats[0].tensor
        for rank, theirs in enumerate(shapes.view(-1, mine.numel()).tolist()):
            if theirs != mine[0].tolist():
                raise GroupArgumentError(
                    f"all_reduce: rank {rank} has a sparse tensor of shape {tuple(theirs[1:])} "
                    f"with indices for {theirs[0]} dimensions, this rank one of shape "
                    f"{tuple(parts.tensor.shape)} with indices for {parts.tensor.sparse_dim()}"
                )
        count = sum(engine.rows(number, 3 * i + 1))
        with torch.no_grad():
            joined = torch.sparse_coo_tensor(
                indices.view(count, parts.tensor.sparse_dim()).t(),
                values.view(count, *parts.dense_shape),
                parts.tensor.shape,
                check_invariants=False,
            )
            parts.tensor.copy_(joined.coalesce().to(parts.tensor.device))  # copies, on the CPU too


def _gathered(engine: _native.Engine, number: int, place: int, flat: Flat) -> Any:
    """All ranks' elements, one after the other."""
    return torch.from_numpy(engine.output(number, place)).view(flat.tensor.dtype)

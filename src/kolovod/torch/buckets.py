"""Gradients that travel together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kolovod import _native
from kolovod.torch.frontend import DTYPES

_BUCKET_BYTES = 1 << 20

Entry = tuple[int, tuple[int, ...], int, int]  # dtype, shape, input, output address

Item = tuple[int, "torch.Tensor | None", int, torch.Tensor, torch.Tensor, "torch.dtype | None"]
"""One gradient of a bucket: the parameter's index; its ``grad`` and the version of that; what takes
the result (``grad`` itself, or zeros where there is none); the dense tensor the engine works on
(the same unless it is compressed or not dense); and the compressor's context."""


class Bucket:
    """Parameters whose gradients are sent together."""

    __slots__ = ("agreed", "engine", "indices", "items", "missing", "name", "number", "unused")

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.missing = len(indices)  # gradients that backward has not finished yet
        self.agreed = False  # all ranks of this world have it, under this name
        self.name = ""
        self.engine: _native.Engine | None = None  # set while on its way
        self.number = 0
        self.items: list[Item] = []  # as they were when backward had finished them
        self.unused: list[int] = []


def cut(indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Neighbours that are sent together, by their sizes alone."""
    groups: list[list[int]] = []
    filled = _BUCKET_BYTES
    for index in indices:
        size = parameters[index].numel() * parameters[index].element_size()
        if filled + size > _BUCKET_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    return groups


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """To send instead of a gradient that cannot be sent, for those who wait for it."""
    dtype = parameter.dtype if parameter.dtype in DTYPES else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype)

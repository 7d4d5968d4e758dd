"""Gradients that travel together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kolovod import _native
from kolovod.core.ops import Average
from kolovod.gradients.compression import Compression, Compressor
from kolovod.torch.frontend import DTYPES
from kolovod.torch.stager import Queued

_BUCKET_BYTES = 1 << 20

Entry = tuple[int, tuple[int, ...], int, int]  # dtype, shape, input, output address

Item = tuple[int, "torch.Tensor | None", int, Any, Any, Any]
"""One gradient of a bucket: the parameter's index; its ``grad`` and the version of that; what takes
the result (``grad`` itself, or zeros where there is none); the dense tensor the engine works on
(the same unless it is compressed or not dense), or of a sparse one indices and values; and the
compressor's context, or of a sparse one the dtypes of the two as the engine knows them."""


class Way(NamedTuple):
    """How gradients travel: ``postscale * op(prescale * gradient)``, compressed."""

    compression: type[Compressor] = Compression.none
    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    sparse_as_dense: bool = False
    """Sparse gradients are sent with all their zeros, and made sparse again."""


class Bucket:
    """Parameters whose gradients are sent together; one only if its gradient is sparse."""

    __slots__ = (
        "agreed", "engine", "indices", "items", "missing", "name", "number", "queued", "sparse_dim",
        "staged", "streams", "unused",
    )  # fmt: skip

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.missing = len(indices)  # gradients that backward has not finished yet
        self.agreed = False  # all ranks of this world have it, under this name
        self.name = ""
        self.engine: _native.Engine | None = None  # set while on its way
        self.number = 0
        self.queued: Queued | None = None  # set instead of the number: gradients on a GPU
        self.staged: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # host memory, and of what
        self.streams: set[Any] = set()  # of GPUs, on which backward has made its gradients
        self.items: list[Item] = []  # as they were when backward had finished them
        self.unused: list[int] = []
        self.sparse_dim = 0  # how many dimensions the gradient has indices for; 0: it is dense


def cut(
    indices: Sequence[int], parameters: Sequence[torch.Tensor], groups: Mapping[int, int]
) -> list[list[int]]:
    """What is sent together: the user's ``groups`` (by ``id``), else neighbours, by their sizes."""
    buckets: list[list[int]] = []
    by_group: dict[int, list[int]] = {}
    neighbours: list[int] = []
    filled = _BUCKET_BYTES
    for index in indices:
        group = groups.get(id(parameters[index]))
        if group is not None:
            if group not in by_group:
                by_group[group] = []
                buckets.append(by_group[group])
            by_group[group].append(index)
            continue
        size = parameters[index].numel() * parameters[index].element_size()
        if filled + size > _BUCKET_BYTES:
            neighbours = []
            buckets.append(neighbours)
            filled = 0
        neighbours.append(index)
        filled += size
    return buckets


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """To send instead of a gradient that cannot be sent, for those who wait for it."""
    dtype = parameter.dtype if parameter.dtype in DTYPES else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype)

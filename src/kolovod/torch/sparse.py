"""Sparse gradients, as torch.nn.Embedding(sparse=True) makes them: indices and values.

Their sum is all ranks' entries one after the other, as PyTorch itself adds sparse tensors: the same
index may come several times, until the tensor is coalesced.
"""

from __future__ import annotations

import torch

from kolovod import _native
from kolovod.core.ops import Average
from kolovod.torch.buckets import Entry, Way
from kolovod.torch.frontend import TorchFrontend


def sparse_dim_of(grad: torch.Tensor | None, way: Way) -> int:
    """How many dimensions a gradient has indices for; 0 for those that are sent with all zeros."""
    return 0 if grad is None or not grad.is_sparse or way.sparse_as_dense else grad.sparse_dim()


def parts(
    grad: torch.Tensor | None, parameter: torch.Tensor, sparse_dim: int, way: Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices, int64 of shape (entries, sparse_dim), and the values, to be sent."""
    if grad is None:
        shape = (0, *parameter.shape[sparse_dim:])
        indices = parameter.new_empty((0, sparse_dim), dtype=torch.int64)
        return indices, parameter.new_empty(shape)
    grad = grad.detach()
    if not grad.is_sparse:
        grad = grad.to_sparse(sparse_dim)
    grad = grad.coalesce()
    values = grad.values()
    if way.prescale != 1.0:
        values = values * way.prescale
    return grad.indices().t().contiguous(), values.contiguous()


def entry(tensor: torch.Tensor, frontend: TorchFrontend) -> tuple[Entry, torch.Tensor]:
    """What the engine is told about one of the parts, and the tensor whose memory that is."""
    code, shape, address, owner = frontend.view(tensor)
    return (code, shape, address, 0), owner


def joined(
    engine: _native.Engine,
    number: int,
    sent: tuple[torch.Tensor, torch.Tensor],
    codes: list[int],
    shape: torch.Size,
    way: Way,
    size: int,
    frontend: TorchFrontend,
) -> torch.Tensor:
    """The gradient that the ranks' parts make together, once they have been gathered.

    ``codes``: the dtypes of the two parts in their entries.
    """
    indices, values = (
        frontend.placed(
            frontend.from_bytes(
                engine.output(number, i), code, (sum(engine.rows(number, i)), *part.shape[1:])
            ),
            part,
        )
        for i, (part, code) in enumerate(zip(sent, codes, strict=True))
    )
    factor = way.postscale / (size if way.op == Average else 1)
    if factor != 1.0:
        values = values * factor
    return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)

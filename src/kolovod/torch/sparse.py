"""Sparse gradients, as torch.nn.Embedding(sparse=True) makes them: indices and values.

Their sum is all ranks' entries one after the other, as PyTorch itself adds sparse tensors: the same
index may come several times, until the tensor is coalesced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kolovod.gradients.compression import Compressor, Payload
from kolovod.gradients.spec import ReduceSpec


def sparse_dim_of(grad: torch.Tensor | None, spec: ReduceSpec) -> int:
    """Return the number of dimensions with indices; 0 for a gradient sent with all its zeros."""
    return 0 if grad is None or not grad.is_sparse or spec.sparse_as_dense else grad.sparse_dim()


def without_entries(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """An empty sparse gradient, for a parameter that has none."""
    indices = parameter.new_empty((sparse_dim, 0), dtype=torch.int64)
    values = parameter.new_empty((0, *parameter.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


class SparseCompressor(Compressor):
    """Sends the entries of gradients that have indices for ``sparse_dim`` dimensions."""

    def __init__(self, sparse_dim: int) -> None:
        """A gradient that is dense is made sparse."""
        self._sparse_dim = sparse_dim

    def compress(self, key: str, tensor: torch.Tensor) -> Payload:
        """Send the indices, int64 of shape (entries, sparse_dim), and the values."""
        grad = tensor.detach()
        if not grad.is_sparse:
            grad = grad.to_sparse(self._sparse_dim)
        grad = grad.coalesce()
        parts = grad.indices().t().contiguous(), grad.values().contiguous()
        return Payload(parts, "allgather", grad.shape)

    def decompress(
        self, key: str, payload: Payload, received: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """All ranks' entries in one tensor."""
        indices, values = received
        return torch.sparse_coo_tensor(indices.t(), values, payload.context, check_invariants=False)

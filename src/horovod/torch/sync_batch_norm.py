"""Horovod's SyncBatchNorm: Kolovod's, on CPUs too, each rank weighing as much as it has samples."""

from __future__ import annotations

from kolovod.torch.sync_batch_norm import SyncBatchNorm as _Synchronized

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_Synchronized):
    """Batch normalisation over the batches of all ranks; see kolovod.torch.SyncBatchNorm."""

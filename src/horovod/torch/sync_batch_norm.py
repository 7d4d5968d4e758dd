"""Horovod's name for the module of SyncBatchNorm."""

from __future__ import annotations

from kolovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

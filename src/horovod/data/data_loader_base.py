"""Horovod's name for the module of the loaders."""

from __future__ import annotations

from kolovod.data import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

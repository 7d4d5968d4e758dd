"""Horovod's name for the module of the compressors."""

from __future__ import annotations

from kolovod.torch.compression import (
    Compression,
    FP16Compressor,
    NoneCompressor,
)

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """What users derive their own from, with these two as static methods."""

    @staticmethod
    def compress(tensor):  # type: ignore[no-untyped-def]  # overridden with whatever context
        """Return what to send, and what ``decompress`` needs to know."""
        raise NotImplementedError("a Compressor needs compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor, ctx):  # type: ignore[no-untyped-def]
        """Return the tensor as it was before ``compress``."""
        raise NotImplementedError("a Compressor needs decompress(tensor, ctx) -> tensor")

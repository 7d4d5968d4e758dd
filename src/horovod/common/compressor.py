"""The base class of users' own compressors."""

from __future__ import annotations

from abc import ABC

from kolovod.gradients.compression import Compression

__all__ = ["Compressor"]


class Compressor(ABC):  # noqa: B024 - what lacks a method says so when it is used, as in Horovod
    """A compressor, whose two static methods are overridden. Ours count as subclasses."""

    @staticmethod
    def compress(tensor):  # type: ignore[no-untyped-def]  # overridden with whatever context
        """Return what to send, and what ``decompress`` needs to know."""
        raise NotImplementedError("a Compressor needs compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor, ctx):  # type: ignore[no-untyped-def]
        """Return the tensor as it was before ``compress``."""
        raise NotImplementedError("a Compressor needs decompress(tensor, ctx) -> tensor")


for _ours in (Compression.none, Compression.fp16, Compression.bf16):
    Compressor.register(_ours)

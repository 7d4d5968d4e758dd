"""What users derive compressors of their own from."""

from __future__ import annotations

__all__ = ["Compressor"]


class Compressor:
    """To be overridden: these two static methods."""

    @staticmethod
    def compress(tensor):  # type: ignore[no-untyped-def]  # overridden with whatever context
        """Return what to send, and what ``decompress`` needs to know."""
        raise NotImplementedError("a Compressor needs compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor, ctx):  # type: ignore[no-untyped-def]
        """Return the tensor as it was before ``compress``."""
        raise NotImplementedError("a Compressor needs decompress(tensor, ctx) -> tensor")

"""Sending gradients in 16 bits.

A compressor is a class with two static methods: ``compress(tensor) -> (tensor, context)`` and
``decompress(tensor, context) -> tensor``. What travels is summed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Compressor(Protocol):
    """What ``DistributedOptimizer(compression=...)`` accepts."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """What to send, and what ``decompress`` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """The values in their original dtype."""
        ...


class NoneCompressor:
    """Send as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return ``tensor``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize:
        return tensor.to(dtype), tensor.dtype
    return tensor, None


def _widen(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
    return tensor if context is None else tensor.to(context)


class FP16Compressor:
    """Send floats wider than 16 bits as float16: 11 bits of precision, values up to 65504."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Round to float16."""
        return _narrow(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Back to the original dtype."""
        return _widen(tensor, context)


class BF16Compressor:
    """Send floats wider than 16 bits as bfloat16: 8 bits of precision, the range of float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Round to bfloat16."""
        return _narrow(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """Back to the original dtype."""
        return _widen(tensor, context)


class Compression:
    """The compressors by name: ``Compression.none``, ``.fp16``, ``.bf16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor

"""Sending gradients in 16 bits, in any framework.

A compressor is a class with two static methods: ``compress(tensor) -> (tensor, context)`` and
``decompress(tensor, context) -> tensor``. What travels is summed in float32 and rounded once.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from kolovod.errors import InvalidArgumentError

_WIDE = ("float32", "float64")


class Compressor(Protocol):
    """What ``compression=`` accepts."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What to send, and what ``decompress`` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The values in their original dtype."""
        ...


class NoneCompressor:
    """Send as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return ``tensor``."""
        return tensor


class FP16Compressor:
    """Send floats wider than 16 bits as float16: 11 bits of precision, values up to 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Round to float16."""
        return _narrow(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Back to the original dtype."""
        return tensor if context is None else cast(tensor, context)


class BF16Compressor:
    """Send floats wider than 16 bits as bfloat16: 8 bits of precision, the range of float32."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Round to bfloat16."""
        return _narrow(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Back to the original dtype."""
        return tensor if context is None else cast(tensor, context)


class Compression:
    """The compressors by name: ``Compression.none``, ``.fp16``, ``.bf16`` (not for MXNet)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def check_compression(compression: Any) -> None:
    """Raise InvalidArgumentError for what is no compressor."""
    for method in ("compress", "decompress"):
        if not callable(getattr(compression, method, None)):
            raise InvalidArgumentError(
                f"compression is {compression!r}: give Compression.none, .fp16 or .bf16"
            )


def dtype_name(tensor: Any) -> str:
    """Of a tensor of any of the frameworks: "float32" and so on."""
    dtype = tensor.dtype
    # PyTorch's dtypes have no name, and MXNet's are NumPy's classes.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def cast(tensor: Any, dtype: str) -> Any:
    """``tensor`` in another dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.to(getattr(torch, dtype))
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(tensor):
        return tf.cast(tensor, dtype)
    return tensor.astype(dtype)


def _narrow(tensor: Any, dtype: str) -> tuple[Any, Any]:
    name = dtype_name(tensor)
    return (cast(tensor, dtype), name) if name in _WIDE else (tensor, None)

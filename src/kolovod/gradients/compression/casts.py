"""Sending gradients in 16 bits: what travels is summed in float32 and rounded once.

These are values as Horovod has them, classes with two methods (``stateless.py``), so that
scripts can call them themselves.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from kolovod.core.codecs import Codec
from kolovod.gradients.compression.auto import Auto
from kolovod.gradients.compression.blocks import Blocks

_WIDE = ("float32", "float64")


class NoneCompressor:
    """Send as it is."""

    codec = Codec.none

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor``, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return ``tensor``."""
        return tensor


class _Cast:
    """Send floats wider than 16 bits as ``_dtype``."""

    _dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return ``tensor`` rounded and the name of its dtype; None for one that stays as it is."""
        name = dtype_name(tensor)
        return (cast(tensor, cls._dtype), name) if name in _WIDE else (tensor, None)

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Return ``tensor`` in its original dtype."""
        return tensor if ctx is None else cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Send floats wider than 16 bits as float16: 11 bits of precision, values up to 65504."""

    _dtype = "float16"


class BF16Compressor(_Cast):
    """Send floats wider than 16 bits as bfloat16: 8 bits of precision, the range of float32."""

    _dtype = "bfloat16"


class Compression:
    """The compressors by name.

    ``none``, ``fp16``, ``bf16`` (not for MXNet); and between hosts alone ``int8`` and ``int4``: see
    ``Blocks``. ``auto(most)``, for PyTorch: the least lossy of them that costs no time; see
    ``Auto``.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Blocks(Codec.int8)
    int4 = Blocks(Codec.int4)
    auto = Auto


def dtype_name(tensor: Any) -> str:
    """Return the name of a tensor's dtype, in any of the frameworks: "float32" and so on."""
    dtype = tensor.dtype
    # PyTorch's dtypes have no name, and MXNet's are NumPy's classes.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(name).removeprefix("torch.")


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element: 4 for "float32", 2 for "bfloat16", 1 for "bool"."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(int(bits.group()) // 8, 1)


def cast(tensor: Any, dtype: str) -> Any:
    """``tensor`` in another dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.to(getattr(torch, dtype))
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(tensor):
        return tf.cast(tensor, dtype)
    return tensor.astype(dtype)

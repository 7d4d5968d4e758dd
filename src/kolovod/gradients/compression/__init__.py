"""Compressors: they say what travels in a gradient's place.

``compressor`` has the shape of every compressor, ``casts`` the two that round to 16 bits,
``blocks`` those of 8 and 4 bits that the engine knows, ``auto`` a choice among them, and
``stateless`` the way from Horovod's shape, two static methods, to ours. ``once`` is for steps that
are repeated.
"""

from __future__ import annotations

from kolovod.gradients.compression.auto import Auto
from kolovod.gradients.compression.blocks import Blocks, InBlocks
from kolovod.gradients.compression.by_name import by_setting, choices_of
from kolovod.gradients.compression.casts import (
    BF16Compressor,
    Compression,
    FP16Compressor,
    NoneCompressor,
    cast,
    dtype_name,
    element_bytes,
)
from kolovod.gradients.compression.compressor import Compressor, Key, Payload
from kolovod.gradients.compression.once import payload_of
from kolovod.gradients.compression.stateless import (
    NOTHING,
    AnyCompressor,
    Stateless,
    StaticCompressor,
    adapted,
)

__all__ = [
    "NOTHING",
    "AnyCompressor",
    "Auto",
    "BF16Compressor",
    "Blocks",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "InBlocks",
    "Key",
    "NoneCompressor",
    "Payload",
    "Stateless",
    "StaticCompressor",
    "adapted",
    "by_setting",
    "cast",
    "choices_of",
    "dtype_name",
    "element_bytes",
    "payload_of",
]

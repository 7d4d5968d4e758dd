"""Horovod's name for the module of the compressors."""

from __future__ import annotations

from horovod.common.compressor import Compressor
from kolovod.gradients.compression import Compression, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

"""Arithmetic that NCCL lacks, on the GPU: factors, averages of integers, bool, 16-bit integers.

This is the twin of host_arithmetic.py, for PyTorch's tensors. Floats travel in their own dtype.
"""

from __future__ import annotations

import torch

from kolovod.backends.base import Reduction
from kolovod.core.ops import Op
from kolovod.torch.frontend import BY_CODE

_UINT16 = getattr(torch, "uint16", None)  # since PyTorch 2.3


class GpuReduction(Reduction):
    """A reduction of tensors on a GPU; see ``Reduction``."""

    def prepared(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this dtype, scaled and in a dtype that NCCL can add."""
        values = _multiplied(_computable(values), self.prescale)
        if self.op is Op.Average and not values.dtype.is_floating_point:
            return values.to(torch.int64)  # the sum must not wrap before it is divided
        return values.to(torch.int32) if values.dtype is torch.int16 else values

    def finished(self, values: torch.Tensor) -> torch.Tensor:
        """Return the group's result divided, scaled and in this dtype."""
        dtype = BY_CODE[self.dtype]
        if self.op is Op.Average:
            if dtype.is_floating_point:
                values = values / self.size
            elif self.postscale == 1.0:
                values = torch.div(values, self.size, rounding_mode="trunc")
            else:
                return _stored(
                    _truncated(values.double() / self.size * self.postscale, dtype), dtype
                )
        elif not dtype.is_floating_point and dtype is not torch.bool:
            values = _computable(_stored(values, dtype))  # wraps before it is scaled
        return _stored(_multiplied(values, self.postscale, dtype), dtype)


def _computable(values: torch.Tensor) -> torch.Tensor:
    """Return the values in a dtype that PyTorch computes with everywhere."""
    if values.dtype is torch.bool:
        return values.to(torch.uint8)
    if values.dtype is _UINT16:
        return values.view(torch.int16).to(torch.int32) & 0xFFFF
    return values


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The opposite of ``_computable``; what does not fit wraps."""
    if dtype is torch.bool:
        return values != 0
    if dtype is _UINT16:
        return values.to(torch.int16).view(dtype)
    return values.to(dtype)


def _multiplied(
    values: torch.Tensor, factor: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``factor * values``; integers of ``dtype`` (their own by default) toward zero."""
    if factor == 1.0:
        return values
    if values.dtype.is_floating_point:
        return values * factor
    return _truncated(values.double() * factor, dtype or values.dtype).to(values.dtype)


def _truncated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Toward zero, clamped to what ``dtype`` can hold; NaN becomes 0. The result is int64."""
    limits = torch.iinfo(dtype)
    too_big, too_small = values >= float(limits.max), values <= float(limits.min)
    inside = torch.where(too_big | too_small | values.isnan(), 0.0, values).to(torch.int64)
    return inside.masked_fill_(too_big, limits.max).masked_fill_(too_small, limits.min)

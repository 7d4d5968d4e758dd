"""Arithmetic that foreign engines lack: factors, averages, bool and 16-bit floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from kolovod import _native
from kolovod.backends.base import Array, Reduction
from kolovod.core.ops import Op

_BFLOAT16 = _native.DTYPES["bfloat16"]
_BOOL = _native.DTYPES["bool"]
STORED = {
    code: np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(name, name))
    for name, code in _native.DTYPES.items()
}
"""What NumPy reads each dtype as; bfloat16 and bool as the bits they are stored in."""


class HostReduction(Reduction):
    """A reduction of arrays in host memory; see ``Reduction``."""

    def prepared(self, values: Array) -> Array:
        """Stored values, scaled and in a dtype that every engine can add."""
        wide = scaled(widened(values, self.dtype), self.prescale, self.dtype)
        if self.op is Op.Average and wide.dtype.kind in "iu":
            return wide.astype(np.int64)  # the sum must not wrap before it is divided
        return wide

    def finished(self, values: Array) -> Array:
        """Return the Backend's result divided, scaled and as it is stored."""
        divisor = self.size if self.op is Op.Average else 1
        return narrowed(divided(values, divisor, self.postscale, self.dtype), self.dtype)


def widened(values: Array, dtype: int) -> Array:
    """16-bit floats as float32, bools as 0 and 1."""
    wide = values
    if dtype == _BFLOAT16:
        wide = np.left_shift(values.astype(np.uint32), 16).view(np.float32)
    elif dtype == _BOOL:
        wide = np.not_equal(values, 0).astype(np.uint8)
    elif values.dtype == np.float16:
        wide = values.astype(np.float32)
    return wide


def narrowed(values: Array, dtype: int) -> Array:
    """The opposite of ``widened``, rounded to nearest, ties to even; a NaN stays one."""
    if dtype == _BFLOAT16:
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return values.astype(STORED[dtype], copy=False)


def scaled(values: Array, factor: float, dtype: int) -> Array:
    """``factor * values``, rounded to the dtype it is stored in (integers: toward zero)."""
    if factor == 1.0:
        return values
    if values.dtype.kind == "f":
        products = (values * values.dtype.type(factor)).astype(values.dtype)
        return widened(narrowed(products, dtype), dtype)
    return _truncated(values * np.float64(factor), values.dtype)


def divided(values: Array, divisor: int, factor: float, dtype: int) -> Array:
    """``values / divisor * factor``; integers are truncated toward zero, once."""
    if divisor == 1 and factor == 1.0:
        return values
    if values.dtype.kind == "f":
        quotient: Array = values / values.dtype.type(divisor) * values.dtype.type(factor)
        return quotient.astype(values.dtype, copy=False)
    if factor == 1.0:
        wide = values.astype(np.int64)  # exact, where a division in float64 would not be
        whole: Array = (wide - np.fmod(wide, divisor)) // divisor
        return whole.astype(values.dtype)
    return _truncated(values / np.float64(divisor) * factor, STORED[dtype])


def _truncated(values: Array, dtype: np.dtype[Any]) -> Array:
    """Toward zero, clamped to what ``dtype`` can hold; NaN becomes 0."""
    limits = np.iinfo(dtype)
    too_big = values >= float(limits.max)
    too_small = values <= float(limits.min)
    inside = np.where(too_big | too_small | np.isnan(values), 0, values)
    result: Array = inside.astype(dtype)
    result[too_big] = limits.max
    result[too_small] = limits.min
    return result

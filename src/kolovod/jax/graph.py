"""Allreduce as a custom call of an XLA program (csrc/bind/xla_ffi.cc).

The handler submits and returns a future: all the allreduces of a program whose inputs are ready are
on their way together, and the engine fuses them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from kolovod import _native
from kolovod.errors import InvalidArgumentError
from kolovod.ops import Op

_TARGET = "kolovod_allreduce"


def register() -> None:
    """Make the custom call known to XLA. Raises ImportError when it cannot be."""
    major, minor = _ffi_version()
    handler = _native.xla_allreduce_handler(major, minor)
    if not handler:
        raise ImportError(
            f"kolovod.jax with jax {jax.__version__}: its foreign function interface has version "
            f"{major}.{minor}, which this version of Kolovod does not know; look for a newer one"
        )
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def _ffi_version() -> tuple[int, int]:
    """What XLA compares with the version of a handler; jaxlib says it only in a header."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text(encoding="utf-8")
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def allreduce(
    tensors: Sequence[jax.Array],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: int,
) -> list[jax.Array]:
    """Reduce ``tensors``, which are being traced, as one group. ``process_set``: its number."""
    if not name:
        raise InvalidArgumentError(
            "inside jax.jit operations run in no fixed order, so ranks match them by name: give "
            "each a name of its own, the same on all ranks"
        )
    if op not in _native.OPS.values():
        known = ", ".join(member.name for member in Op)
        raise InvalidArgumentError(f"op is {op!r}: give one of {known}")
    results = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]
    call = jax.ffi.ffi_call(_TARGET, results, vmap_method="broadcast_all")
    attributes = {
        "name": name,
        "op": np.int64(op),
        "prescale": np.float64(scales[0]),
        "postscale": np.float64(scales[1]),
        "process_set": np.int64(process_set),
    }
    return list(call(*tensors, **attributes))

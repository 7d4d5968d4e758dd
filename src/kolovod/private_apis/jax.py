"""Parts of JAX that its documentation does not promise, and ``kolovod.jax`` uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import io_callback
from jax.interpreters import mlir

__all__ = [
    "FUNCTIONS",
    "has_caches",
    "ordered_effect",
    "replace_caches",
    "version_of_ffi",
    "written_for_each_use",
]

FUNCTIONS = "cached_primitive_lowerings"
_CACHES = (FUNCTIONS, "lowering_cache")
"""Where a module's context keeps what JAX has written into it: functions, and (since 0.7)
operations. No public interface says what is shared, or keeps a function from being so."""


def _keeps_operations() -> bool:
    return "cacheable" in inspect.signature(mlir.register_lowering).parameters


def written_for_each_use() -> Mapping[str, bool]:
    """Return the options of ``mlir.register_lowering`` for an operation with names of its own.

    Since 0.7 JAX writes equal operations once.
    """
    return {"cacheable": False} if _keeps_operations() else {}


def has_caches(module: Any) -> bool:
    """Return whether caches are where all versions of JAX had them that Kolovod was tried with."""
    needed = _CACHES if _keeps_operations() else _CACHES[:1]
    return all(isinstance(getattr(module, cache, None), dict) for cache in needed)


def replace_caches(module: Any, new: Callable[[dict[Any, Any]], dict[Any, Any]]) -> None:
    """Have the context of a ``module`` keep what it writes in ``new(cache)`` from now on."""
    for cache in _CACHES:
        if hasattr(module, cache):
            setattr(module, cache, new(getattr(module, cache)))


def ordered_effect() -> Any:
    """Return the effect that keeps calls in order within a program, and between programs."""
    program = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))()
    (effect,) = program.effects
    return effect


def version_of_ffi() -> tuple[int, int]:
    """Return the version that XLA compares with a handler's; jaxlib has it only in a header."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    text = header.read_text(encoding="utf-8")
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1])  # type: ignore[index]
        for part in ("MAJOR", "MINOR")
    )
    return major, minor

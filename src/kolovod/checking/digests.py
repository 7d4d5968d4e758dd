"""Digests of arrays and batches: equal where the contents are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kolovod.checking.facts import Values

__all__ = ["array_values", "digest_of", "text_digest"]

ToArray = Callable[[Any], Any]
"""Of a tensor, the NumPy array of its bytes or values; None for what is no tensor."""
_MOST_BYTES = 64 << 20  # of one tensor; of a larger one evenly spaced parts
_PARTS = 1024
_SAMPLE = 256
_MOST_ITEMS = 10_000


def digest_of(value: Any, to_array: ToArray) -> str:
    """Return a digest of the tensors, arrays, numbers and texts in a value; "" if there are none.

    They may be in lists, tuples and dicts.
    """
    digest = hashlib.blake2b(digest_size=12)
    return digest.hexdigest() if _feed(digest, value, to_array, 0) else ""


def _feed(digest: Any, value: Any, to_array: ToArray, depth: int) -> bool:
    array = value if isinstance(value, np.ndarray | np.generic) else to_array(value)
    if array is not None:
        array = np.asarray(array)
        if array.dtype == object:
            return False
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(_bytes(array))
        return True
    if isinstance(value, str | bytes | int | float | bool):
        digest.update(repr(value).encode())
        return True
    if depth > 8:
        return False
    if isinstance(value, Mapping):
        items: Any = [item for pair in list(value.items())[:_MOST_ITEMS] for item in pair]
    elif isinstance(value, list | tuple):
        items = value[:_MOST_ITEMS]
    elif hasattr(value, "__dict__"):  # a batch of a class of its own, as of PyTorch Geometric
        items = [item for pair in sorted(vars(value).items()) for item in pair]
    else:
        return False
    # A name alone says nothing of the content.
    fed = [_feed(digest, item, to_array, depth + 1) for item in items]
    is_named = isinstance(value, Mapping) or not isinstance(value, list | tuple)
    return any(fed[1::2] if is_named else fed)


def _bytes(array: Any) -> bytes:
    if array.nbytes <= _MOST_BYTES:
        return bytes(array.tobytes())  # also of a dtype that has no buffer, as bfloat16
    flat = array.reshape(-1)
    length = _MOST_BYTES // _PARTS // array.itemsize
    starts = np.linspace(0, flat.size - length, _PARTS).astype(np.int64)
    return b"".join(flat[start : start + length].tobytes() for start in starts)


def array_values(array: Any) -> Values:
    """Return the values of a NumPy array, as far as ranks are compared by them."""
    given = flat = np.asarray(array).reshape(-1)
    if flat.dtype.name.startswith(("bfloat16", "float8")):  # which NumPy knows by name only
        flat = flat.astype(np.float32)
    sample = flat
    if flat.size > _SAMPLE:
        sample = flat[np.linspace(0, flat.size - 1, _SAMPLE).astype(np.int64)]
    numbers = [] if flat.dtype.kind not in "fiub" else [float(each) for each in sample]
    whole = given.nbytes <= _MOST_BYTES and flat.size <= _SAMPLE
    bad = int(np.count_nonzero(~np.isfinite(flat))) if flat.dtype.kind in "fc" else 0
    return Values(digest_of(given, lambda value: None), numbers, whole, bad)


def text_digest(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()

"""Horovod's handles are numbers, counted from 1 in each process, which ``synchronize`` forgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from kolovod.core.handles import Handle

_numbers = itertools.count(1)
_pending: dict[int, tuple[Handle[Any], Callable[[Any], Any] | None]] = {}


def number_of(handle: Handle[Any], finish: Callable[[Any], Any] | None = None) -> int:
    """A number for ``handle``; ``finish`` makes of its result what ``synchronize`` returns."""
    number = next(_numbers)
    _pending[number] = handle, finish
    return number


def poll(handle: int) -> bool:
    """Return whether ``synchronize`` would not wait. Raises ValueError for an unknown handle."""
    if handle not in _pending:
        raise ValueError(f"handle {handle} was not given out, or was synchronized before")
    return _pending[handle][0].poll()


def synchronize(handle: int) -> Any:
    """The operation's result, once it is complete; None for an unknown handle."""
    if handle not in _pending:
        return None
    pending, finish = _pending.pop(handle)
    result = pending.wait()
    return result if finish is None else finish(result)


def forget() -> None:
    """Forget all handles, and count anew: their world has ended."""
    global _numbers
    _numbers = itertools.count(1)
    _pending.clear()

"""Horovod's words for calls before ``init``: scripts, and others' tests, look for them.

Errors use them if the call came through ``horovod``, which the stack shows; ``kolovod``'s own names
keep their words, in the same process, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from kolovod.core import world

__all__ = ["through_horovod"]

P = ParamSpec("P")
R = TypeVar("R")


def through_horovod(function: Callable[P, R]) -> Callable[P, R]:
    """A function of ``kolovod`` under Horovod's name, so that the stack shows it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    return run


def _worded(text: str) -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_horovods(frame):
            return f"Horovod has not been initialized: {text}"
        frame = frame.f_back
    return text


def _is_horovods(frame: FrameType) -> bool:
    """Return whether a frame is of our code, or of a method that a class of ours has inherited."""
    names = [str(frame.f_globals.get("__name__", ""))]
    if frame.f_code.co_varnames[:1] == ("self",):
        names.append(str(type(frame.f_locals.get("self")).__module__))
    # The runner's frames are below a function that it calls, whatever that uses.
    return any(n.startswith("horovod.") and not n.startswith("horovod.runner") for n in names)


world.word_with(_worded)

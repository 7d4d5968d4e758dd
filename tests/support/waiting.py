"""Waiting for what a test can see, instead of for time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 60.0
"""Many times what anything here takes while four other processes are busy on two cores."""


def until(condition: Callable[[], T], what: str = "", deadline_s: float = DEADLINE_S) -> T:
    """The first true value of ``condition()``; AssertionError if there is none in time.

    ``what``: what should have come about, for the message.
    """
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what or condition}"
        time.sleep(0.005)
    return found

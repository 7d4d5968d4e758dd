"""Waiting for what a test can see, instead of for time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
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


class Marks:
    """Events between processes, however the world fares: files in a folder of this test."""

    def __init__(self, folder: Path) -> None:
        """The folder may be made by whoever makes the first mark."""
        self.folder = folder

    def make(self, *names: object) -> None:
        """These have happened."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (self.folder / str(name)).touch()

    def there(self, *names: object) -> bool:
        """Whether all of these have happened."""
        return all((self.folder / str(name)).exists() for name in names)

    def wait_for(self, *names: object) -> None:
        """Return when all of these have happened."""
        until(lambda: self.there(*names), f"marks {names}")

    def meet(self, name: str, rank: int, size: int) -> None:
        """A barrier of ranks that have no world yet, or whose world is about to end."""
        self.make(f"{name} {rank}")
        self.wait_for(*(f"{name} {each}" for each in range(size)))

"""The countdown of backward passes that each gradient waits for before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_FAR = 1 << 62


class Countdown:
    """One number per gradient, which the hooks lower; at 0 it is sent, below it is one too many."""

    def __init__(self, passes: int) -> None:
        """``passes``: where each number starts."""
        self.passes = passes
        self.left: list[int] = []
        """The numbers that hooks lower, always the same list, so that they can hold it."""
        self.numbers = self.left
        """The passes that are left for each gradient, whether backward may lower them or not."""

    @property
    def begun(self) -> bool:
        """True if a pass was counted since ``reset``."""
        return min(self.numbers, default=self.passes) < self.passes

    @property
    def is_held(self) -> bool:
        """True within ``hold``."""
        return self.numbers is not self.left

    def add(self, count: int) -> None:
        """Take more gradients."""
        self.numbers.extend([self.passes] * count)
        if self.is_held:
            self.left.extend([_FAR] * count)

    def reset(self) -> None:
        """Start anew."""
        self.numbers[:] = [self.passes] * len(self.numbers)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within this context passes are not counted; it costs the hooks nothing."""
        if self.is_held:
            yield
            return
        self.numbers = list(self.left)
        self.left[:] = [_FAR] * len(self.left)
        try:
            yield
        finally:
            self.left[:] = self.numbers
            self.numbers = self.left

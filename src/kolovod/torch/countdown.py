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
        self._held: list[int] | None = None

    @property
    def numbers(self) -> list[int]:
        """The passes that are left for each gradient, whether backward may lower them or not."""
        return self.left if self._held is None else self._held

    @property
    def begun(self) -> bool:
        """True if a pass was counted since ``reset``."""
        return min(self.numbers, default=self.passes) < self.passes

    @property
    def is_held(self) -> bool:
        """True within ``hold``."""
        return self._held is not None

    def add(self, count: int) -> None:
        """Take more gradients."""
        self.numbers.extend([self.passes] * count)
        if self._held is not None:
            self.left.extend([_FAR] * count)

    def reset(self) -> None:
        """Start anew."""
        self.numbers[:] = [self.passes] * len(self.numbers)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within this context passes are not counted; it costs the hooks nothing."""
        if self._held is not None:
            yield
            return
        self._held = list(self.left)
        self.left[:] = [_FAR] * len(self.left)
        try:
            yield
        finally:
            self.left[:], self._held = self._held, None

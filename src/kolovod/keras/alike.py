"""Whether the ranks' models, learning rates and steps are still alike; see gradients/sentinel.py.

Keras traces its step, so the facts are numbers of the program: steps taken, the learning rate and,
in every tenth step, the sum of the bits of all variables. Each rank gets all ranks' facts, and only
where they differ the program comes back to Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kolovod.gradients import sentinel
from kolovod.gradients.sentinel import OPTIONS, STEPS, WEIGHTS, Facts, Like

EVERY = 10
"""Steps, in which variables are compared."""
NUMBERS = 3
"""Facts of a rank: steps + 1, the learning rate's bits, and those of all variables."""


class Alike:
    """Looks after one optimizer, on this rank."""

    def __init__(self, optimizer: Any) -> None:
        """``optimizer``: what has ``iterations`` and ``learning_rate``."""
        self._optimizer = weakref.ref(optimizer)
        self._told: set[int] = set()

    def numbers(self) -> tuple[Any, Any] | None:
        """How many steps it has taken, and its learning rate; None where there is no telling."""
        optimizer = self._optimizer()
        if optimizer is None or sentinel.policy() == "off":
            return None
        rate = getattr(optimizer, "learning_rate", None)
        if rate is None or callable(rate):
            rate = 0.0  # what a schedule makes of the number of steps is alike where that is
        return optimizer.iterations, rate

    def teller(
        self, ranks: Sequence[int], names: Sequence[str], is_first: bool
    ) -> Callable[[Any], None]:
        """What takes all ranks' facts where they differ. It may be called again and again."""
        kind_of_optimizer = type(self._optimizer()).__name__

        def tell(table: Any) -> None:
            rows = np.asarray(table, np.int32).reshape(-1, NUMBERS)
            is_there = rows[:, 0] > 0  # the others have joined
            rows = rows[is_there] - np.array([1, 0, 0], np.int32)
            differing = {
                kind
                for column, kind in enumerate((STEPS, OPTIONS, WEIGHTS))
                if len(set(rows[:, column].tolist())) > 1
            }
            kinds = differing - self._told
            if kinds:
                self._told |= sentinel.follow_from(kinds)
                said = [_facts(row.tolist(), names) for row in rows]
                like = Like(kind_of_optimizer, [ranks[int(i)] for i in is_there.nonzero()[0]])
                sentinel.tell(sentinel.text_of(sorted(kinds), said, like), is_first=is_first)

        return tell


def _facts(row: Sequence[int], names: Sequence[str]) -> Facts:
    count, bits, weights = row
    (rate,) = np.array([bits], np.int32).view(np.float32)
    what = names[0] if len(names) == 1 else f"{names[0]}' to '{names[-1]}"
    return Facts(count, {names[0]: {"learning_rate": float(str(rate))}}, [(what, weights)])

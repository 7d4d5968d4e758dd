"""Comparison of the ranks' models, learning rates and steps, by numbers: see sentinel.py.

It serves Keras, which traces its step, and MXNet. The facts of a rank are the number of steps
taken, the learning rate, in every tenth step the sum of the bits of variables, and which of some
gradients is not finite before it is averaged. Each rank gets all ranks' facts, and only where they
differ ``tell`` is called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kolovod.gradients import sentinel
from kolovod.gradients.sentinel import OPTIONS, STEPS, WEIGHTS, Facts, Like

EVERY = 10
"""Variables are compared in one of so many steps."""
ELEMENTS = 256
"""The elements of a gradient that are looked at."""
NUMBERS = 4
"""Facts of a rank: steps + 1, the learning rate's bits, those of all variables, and 0 or a number
of the first of the gradients that is not finite: ``place_of_bad``."""
_GRADIENTS = 8  # that are looked at
_HEALTH = sentinel.KINDS  # of what was told, beside the kinds of facts


def place_of_bad(first: Any, size: int, rank: int) -> Any:
    """The fourth number of a rank; it differs between ranks, so that it is seen where all have one.

    ``first``: 1 + the place of the first gradient that is not finite.
    """
    return first * size + rank


class Alike:
    """Looks after one optimizer, on this rank."""

    def __init__(self, optimizer: Any, steps: str = "iterations") -> None:
        """``optimizer``: what has ``learning_rate``, and its number of steps in ``steps``."""
        self._optimizer = weakref.ref(optimizer)
        self._steps = steps
        self._told: set[int] = set()

    def is_of(self, optimizer: Any) -> bool:
        """Return whether ``optimizer`` is the one that is looked after."""
        return self._optimizer() is optimizer

    def numbers(self) -> tuple[Any, Any] | None:
        """Return the number of steps taken and the learning rate, or None: nothing is compared."""
        optimizer = self._optimizer()
        if optimizer is None or sentinel.policy() == "off":
            return None
        rate = getattr(optimizer, "learning_rate", None)
        if rate is None or callable(rate):
            rate = 0.0  # what a schedule makes of the number of steps is alike where that is
        return getattr(optimizer, self._steps), rate

    def looked_at(self, grads: Sequence[Any]) -> Sequence[int]:
        """The places of the gradients that are looked at; ``grads`` has no None and the like.

        Empty where a LossScaleOptimizer sees to it.
        """
        is_scaled = hasattr(self._optimizer(), "inner_optimizer")
        return [] if is_scaled else sentinel.sample_of(range(len(grads)), _GRADIENTS)

    def teller(
        self, ranks: Sequence[int], names: Sequence[str], looked_at: Sequence[str], is_first: bool
    ) -> Callable[[Any], None]:
        """Return a function that reports where ranks differ; it may be called again and again.

        It takes the table of all ranks' facts. ``names``: of the variables; ``looked_at``: of those
        whose gradients are looked at.
        """
        kind_of_optimizer = type(self._optimizer()).__name__

        def tell(table: Any) -> None:
            rows = np.asarray(table, np.int32).reshape(-1, NUMBERS)
            is_bad = rows[:, 3] > 0
            if is_bad.any() and _HEALTH not in self._told:
                self._told.add(_HEALTH)
                first = rows[is_bad, 3].min() // len(rows) - 1
                bad = [ranks[int(i)] for i in is_bad.nonzero()[0]]
                step = f"step {rows[is_bad, 0][0]}"
                if is_first:
                    text = sentinel.of_gradients(bad, step, looked_at[first])
                    sentinel.warn(text, "this is said once")
            is_there = rows[:, 0] > 0  # the others have joined
            rows = rows[is_there] - np.array([1, 0, 0, 0], np.int32)
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
    count, bits, weights, _ = row
    (rate,) = np.array([bits], np.int32).view(np.float32)
    what = names[0] if len(names) == 1 else f"{names[0]}' to '{names[-1]}"
    return Facts(count, {names[0]: {"learning_rate": float(str(rate))}}, [(what, weights)])

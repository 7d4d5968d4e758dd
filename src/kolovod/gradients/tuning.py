"""Trials of bucket sizes: steps of two sizes by turns, and the faster one is kept.

How large a bucket is to be follows from the link (``plan.bucket_bytes``). What that rule cannot
know (how evenly backward makes gradients, who else uses the link) is measured where the user asks
for it. Only the first rank measures; the others follow.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kolovod.core import spans
from kolovod.core.world import current
from kolovod.errors import FrontEndArgumentError, NotInitializedError
from kolovod.gradients import plan

WARM_UP_STEPS = 5
STEPS_EACH = 15
"""The number of steps of each size in a trial."""
_BETTER = 0.98
_FACTOR = 4


class BucketTrials:
    """At most two trials: of larger buckets than the rule says, then of smaller or still larger."""

    def __init__(
        self,
        log: Callable[[dict[str, Any]], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        on_device: bool = False,
    ) -> None:
        """``log(decision)`` gets each decision. ``now_ns``: the clock.

        ``on_device``: gradients are on a GPU.
        """
        self._log, self._now_ns = log, now_ns
        self._range = plan.range_of_bytes(on_device=on_device)
        self._step = 0
        self._last_ns: int | None = None
        self._times_ms: dict[int, list[float]] = {}
        self._pair: tuple[int, int] | None = None
        self._trials = 0
        self.is_over = False
        """True: nothing is tried any more."""

    def next_bytes(self, now: int) -> int:
        """Return, at a step's end, the size of the next step's buckets; this step's had ``now``."""
        end_ns = self._now_ns()
        last_ns, self._last_ns = self._last_ns, end_ns
        self._step += 1
        if self.is_over or self._step <= WARM_UP_STEPS or last_ns is None:
            return now
        if self._pair is None:
            return self._begin(now, now * _FACTOR)
        self._times_ms.setdefault(now, []).append((end_ns - last_ns) / 1e6)
        first, second = self._pair
        if len(self._times_ms.get(second, [])) < STEPS_EACH:
            return second if now == first else first
        return self._decide(first, second)

    def _begin(self, first: int, second: int) -> int:
        """Try ``second`` against ``first``; without a trial where it is out of range."""
        least, most = self._range
        if not least <= second <= most:
            self._trials += 1
            return self._after(first, first_won=True)
        self._pair = first, second
        self._times_ms.clear()
        return first

    def _decide(self, first: int, second: int) -> int:
        medians = {size: statistics.median(self._times_ms[size]) for size in (first, second)}
        second_won = medians[second] < _BETTER * medians[first]
        chosen = second if second_won else first
        self._trials += 1
        other = first if second_won else second
        spans.chosen(
            f"buckets of {chosen >> 10} KiB: {medians[chosen]:.1f} ms a step, "
            f"{medians[other]:.1f} ms with {other >> 10} KiB"
        )
        self._log(
            {
                "step": self._step,
                "trial": self._trials,
                "bucket_bytes": [first, second],
                "step_ms": [round(medians[first], 3), round(medians[second], 3)],
                "chosen": chosen,
                "why": f"medians of {STEPS_EACH} steps each, by turns; a size must be "
                f"{1 - _BETTER:.0%} faster to replace the other",
            }
        )
        return self._after(chosen, first_won=not second_won)

    def _after(self, best: int, *, first_won: bool) -> int:
        self._pair = None
        if self._trials >= 2:
            self.is_over = True
            return best
        return self._begin(best, best // _FACTOR if first_won else best * _FACTOR)


def asked_for(optimizer: int, *, on_device: bool) -> BucketTrials | None:
    """Return the trials of bucket sizes that ``--autotune`` asks for, or None.

    They are for the optimizer with this number, and log to ``--autotune-log-file``. ``on_device``:
    its gradients are on a GPU.
    """
    try:
        settings = current().settings
    except NotInitializedError:
        return None
    log = log_to(settings.autotune_log_file, optimizer)
    return BucketTrials(log, on_device=on_device) if settings.autotune else None


def log_to(path: str, optimizer: int) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes decisions to a file as lines of JSON; "": nowhere.

    It raises InvalidArgumentError where the file cannot be written.
    """
    if not path:
        return lambda decision: None

    def log(decision: dict[str, Any]) -> None:
        try:
            with Path(path).open("a") as file:
                file.write(json.dumps({"optimizer": optimizer, **decision}) + "\n")
        except OSError as error:
            raise FrontEndArgumentError(
                f"KOLOVOD_AUTOTUNE_LOG_FILE={path!r} cannot be written: {error.strerror}"
            ) from None

    return log

"""Which of several compressions gradients take: the least lossy that hides behind backward.

The engine knows what a link between hosts carries, and the reducer how long backward goes on after
the first bucket has left. What takes no longer than that costs a step nothing, but for the last
bucket. Only the first rank compares; the others follow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kolovod import _native
from kolovod.core import spans

STEPS = 10
"""Steps between two looks, and those whose median counts."""
_ENCODED = {name: 4 * 256 / size for name, size in _native.CODEC_BYTES.items()}
FEWER = {"none": 1.0, "fp16": 2.0, "bf16": 2.0, **_ENCODED}
"""How many times fewer bytes than float32."""
_LATE, _EARLY = 1.1, 0.8
"""A lossier one is taken when that of now takes longer than backward times the first; a less lossy
one comes back when it takes less than backward times the second."""


class Choice:
    """The place of what is taken in a list of compressions, the least lossy first."""

    def __init__(
        self,
        names: Sequence[str],
        log: Callable[[dict[str, Any]], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``names``: of ``FEWER``. ``log(decision)`` gets each decision. ``now_ns``: the clock."""
        self._names = tuple(names)
        self._log, self._now_ns = log, now_ns
        self._began_ns: int | None = None
        self._hidden_us: deque[float] = deque(maxlen=STEPS)
        self._steps = 0
        self._rate = 0.0

    def bucket_leaves(self) -> None:
        """Note that backward has finished a bucket."""
        if self._began_ns is None:
            self._began_ns = self._now_ns()

    def backward_ends(self) -> None:
        """Note that a step waits for gradients; it counts if a bucket has left before."""
        if self._began_ns is not None:
            self._hidden_us.append((self._now_ns() - self._began_ns) / 1e3)
        self._began_ns = None

    def wanted(self, now: int, link_bytes_per_us: float, all_bytes: int, hosts: int) -> int:
        """Return, at a step's end, the place for the next step; this one's was ``now``.

        ``link_bytes_per_us``: 0 where ranks are on one host. ``all_bytes``: of gradients as they
        are. ``hosts``: among which they are added up; each sends and receives 2 (hosts - 1) / hosts
        of the bytes.
        """
        self._steps += 1
        if hosts < 2 or link_bytes_per_us <= 0:
            return 0
        if self._steps % STEPS or len(self._hidden_us) < STEPS // 2:
            return now
        hidden = statistics.median(self._hidden_us)
        plain = all_bytes * 2 * (hosts - 1) / hosts / link_bytes_per_us
        takes = [plain / FEWER[name] for name in self._names]
        chosen = now
        if takes[now] > _LATE * hidden:
            fitting = [place for place, each in enumerate(takes) if each <= hidden]
            chosen = min([place for place in fitting if place > now], default=len(takes) - 1)
        else:
            chosen = min(p for p in range(now + 1) if p == now or takes[p] <= _EARLY * hidden)
        if chosen != now:
            self._say(now, chosen, takes, hidden)
            self._hidden_us.clear()
        return chosen

    def _say(self, now: int, chosen: int, takes: Sequence[float], hidden: float) -> None:
        why = (
            f"{takes[chosen] / 1e3:.1f} ms between hosts, {takes[now] / 1e3:.1f} with "
            f"{self._names[now]}, beside {hidden / 1e3:.1f} ms of backward"
        )
        spans.chosen(f"compression {self._names[chosen]}: {why}")
        self._log({"step": self._steps, "compression": self._names[chosen], "why": why})

"""The step rate of the ranks on this host, for who starts them: looked at now and then.

A rank that is looked at notes what it does (``observe.live``), which costs it a little. So it is
looked at for some seconds of each half minute, and only while somebody asks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kolovod.launch.job_watch import JobWatch
from kolovod.launch.running_jobs import RunningJob, running_jobs
from kolovod.observe.live.picture import Picture

__all__ = ["StepRateProbe", "Seen", "seen_in"]

_LOOK_S = 3.0  # what ranks have noted since then is in the second look
_REST_S = 22.0
_ASKED_S = 10.0  # since the last call of ``now``: then nobody asks any more
_LITTLE = 0.05  # of the time: no rank is slow that holds up the others less


@dataclass(frozen=True)
class Seen:
    """The step rate that was seen of the ranks on this host."""

    steps_per_s: float | None = None
    """None: not known, or there are no steps."""
    slowest: int | None = None
    """The rank that holds up the others most; None: nobody does so much, or it is not known."""
    holds_up: float = 0.0
    """The share of the time in which the others wait for it."""
    is_all: bool = True
    """Whether all ranks are on this host."""


def seen_in(picture: Picture) -> Seen:
    """Return the step rate that ``picture`` shows."""
    rates = [each.steps.per_s for each in picture.ranks if each.steps is not None]
    shares = {e.rank: e.held_up or 0.0 for e in picture.ranks if e.rank is not None}
    late = {e.rank: e.late_s for e in picture.ranks if e.rank is not None and e.late}
    slowest: int | None = None
    if late:  # the others wait right now
        slowest = max(late, key=lambda rank: late[rank])
    elif len(shares) > 1:
        slowest = max(shares, key=lambda rank: shares[rank])
        if shares[slowest] <= _LITTLE:
            slowest = None
    return Seen(
        min(rates, default=None),
        slowest,
        0.0 if slowest is None else shares[slowest],
        len(picture.hosts) < 2,
    )


class StepRateProbe:
    """A thread of its own that looks at the processes ``pids()``."""

    def __init__(self, pids: Callable[[], Collection[int]]) -> None:
        self._pids = pids
        self._seen = Seen()
        self._asked_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kolovod step rate", daemon=True)

    def now(self) -> Seen:
        """Return what was seen last, half a minute ago at most. Called by one thread at a time."""
        self._asked_s = time.monotonic()
        if self._thread.ident is None and not self._is_over.is_set():
            self._thread.start()
        return self._seen

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(10)

    def _run(self) -> None:
        watch = JobWatch(self._find)
        pause_s = _LOOK_S
        while not self._is_over.wait(pause_s):
            pause_s = _LOOK_S
            if time.monotonic() - self._asked_s > _ASKED_S:
                self._seen = Seen()
                continue
            watch.look()
            if self._is_over.wait(_LOOK_S):
                break
            found = watch.look()
            self._seen = Seen() if found is None else seen_in(found[1])
            if self._seen.steps_per_s is not None:
                pause_s = _REST_S
            watch.close()
        watch.close()

    def _find(self) -> RunningJob | None:
        own = set(self._pids())
        for job in running_jobs(uid=os.geteuid()):  # others' processes are none of ours
            if any(rank.pid in own for rank in job.ranks):
                return job
        return None

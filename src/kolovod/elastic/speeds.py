"""Shares of a step's samples by the ranks' speeds, and how a rank measures its own.

A rank's speed is samples a second of its own work: the time of a step without that in which the
script did nothing but wait for communication. Shares that are proportional to speeds let all ranks
end at the same time. A step also has work that does not depend on its samples; then each new deal
comes closer to equal times, and none goes beyond them, since the speed is measured at the share
that the rank has.
"""

from __future__ import annotations

import contextlib
import heapq
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from kolovod import _native
from kolovod.core import spans
from kolovod.core.world import current, is_initialized
from kolovod.observe.reading import length, union
from kolovod.observe.recorder import Batch, Recorder, engines_of

__all__ = ["SpeedMeter", "is_due", "shares_of", "split", "steps_until_due"]

_PARTS = 10_000
_ALIKE = 0.03  # of a share: as far as measuring goes
_FIRST_DUE, _PERIOD = 10, 160  # steps
_MEASURED = 8  # steps before a deal
_MOST = 100_000


def is_due(done: int) -> bool:
    """Return whether shares are to be agreed on after ``done`` steps: 10, 20, 40, 80, 160, 320."""
    return done > 0 and steps_until_due(done - 1) == 1


def steps_until_due(done: int) -> int:
    """Return in how many steps shares are to be agreed on, ``done`` steps after the last time."""
    due = _FIRST_DUE
    while due <= done:
        due += min(due, _PERIOD)
    return due - done


def split(total: int, shares: Sequence[int], most: int) -> list[int]:
    """Return ``total`` cut into parts such that the largest part over its share is least.

    So the last rank ends as early as can be. No part is above ``most``, and each is at least 1 if
    ``total`` allows. ``shares``: positive; equal ones give parts that differ by one at most, the
    larger ones first. ``most`` times the number of parts is at least ``total``. This is D'Hondt's
    method of apportionment, with limits.
    """
    whole, least = sum(shares), int(total >= len(shares))
    parts = [min(max(total * share // whole, least), most) for share in shares]
    grows = sum(parts) < total
    heap: list[tuple[float, int]] = []

    def push(at: int) -> None:
        part, share = parts[at], shares[at]
        if grows and part < most:
            heapq.heappush(heap, ((part + 1) / share, at))
        elif not grows and part > least:
            heapq.heappush(heap, (-part / share, -at))

    for at in range(len(parts)):
        push(at)
    for _ in range(abs(total - sum(parts))):
        at = abs(heapq.heappop(heap)[1])
        parts[at] += 1 if grows else -1
        push(at)
    return parts


def shares_of(
    speeds: Mapping[int, float], members: Iterable[int], before: Mapping[int, int]
) -> dict[int, int]:
    """Return each member's share of a step's samples; {}: all have equal ones.

    ``speeds``: samples a second by member; 0 or none where it is not known, and the others' mean is
    taken. ``before``: the shares of the present deal, which stay where no speed is known, and where
    the new ones hardly differ.
    """
    who = list(members)
    known = [speeds[member] for member in who if speeds.get(member, 0) > 0]
    if not known:
        usual = sum(before.values()) // max(len(before), 1)
        return {member: before.get(member, usual) for member in who} if before else {}
    mean = statistics.fmean(known)
    taken = {member: speeds.get(member, 0) or mean for member in who}
    total = sum(taken.values())
    shares = {member: max(1, round(_PARTS * taken[member] / total)) for member in who}
    present = before or dict.fromkeys(who, _PARTS // len(who))
    is_near = present.keys() == shares.keys() and all(
        abs(share - present[member]) <= _ALIKE * present[member] for member, share in shares.items()
    )
    return dict(before) if is_near else shares


class SpeedMeter:
    """Measures this rank's speed in the last steps before shares are agreed on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._recorder = Recorder(_engines, spans.log)
        self._began_s = 0.0
        self._speeds: list[float] = []

    @property
    def speed(self) -> float:
        """Samples a second: the median of the measured steps; 0: none has been measured."""
        return statistics.median(self._speeds) if self._speeds else 0.0

    def step(self, done: int, samples: int) -> None:
        """Note the end of the ``done``-th step with the present shares, and its samples."""
        if self._recorder.on:
            passed_s = self._clock() - self._began_s
            with contextlib.suppress(_native.EngineError):  # the world has failed in this step
                self._recorder.pull()
                waited_s = waiting_ns(self._recorder.take(_MOST)) / 1e9
                if samples and passed_s > waited_s:
                    self._speeds.append(samples / (passed_s - waited_s))
        if steps_until_due(done) == _MEASURED:
            self._speeds.clear()
            self._recorder.switch(True)
        elif is_due(done):
            self.stop()
        self._began_s = self._clock()

    def stop(self) -> None:
        """Measure no more until the next time; what was measured stays."""
        self._recorder.switch(False)
        self._recorder.take(_MOST)

    def forget(self) -> None:
        """Forget what was measured: other shares follow."""
        self.stop()
        self._speeds.clear()


def waiting_ns(step: Batch) -> float:
    """Return how long the script waited for communication in a step, in nanoseconds.

    Where it does not tell (operations in graphs), it is the longest time that one of this rank's
    operations waited for the other ranks: what a rank that computes faster is ahead by. It leaves
    out what all ranks wait for alike, so shares take longer to become the right ones.
    """
    waits = [
        (float(start), float(end))
        for name, _, start, end, _ in step.spans
        if name in (spans.WAIT, spans.WAIT_FOR_GRADIENTS)
    ]
    if waits:
        return length(union(waits))
    return max(((started or ended) - at for *_, at, started, ended in step.operations), default=0)


def _engines() -> Mapping[str, _native.Engine]:
    return engines_of(current()) if is_initialized() else {}

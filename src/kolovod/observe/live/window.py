"""The last seconds of some ranks, from what they show: steps, shares, who is late. PURE."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kolovod.core.spans import OPTIMIZER_STEP, WAIT, WAIT_FOR_GRADIENTS, Span
from kolovod.observe.reading import Key, Operation, RankEvents, repeated
from kolovod.observe.recorder import Operation as Recorded
from kolovod.observe.trace import label

__all__ = ["WINDOW_S", "Look", "Pending", "Steps", "Window", "late_ranks", "steps_of"]

WINDOW_S = 5.0
_LATE_S = 1.0


class Pending(NamedTuple):
    """An operation that a rank has submitted, and that is not complete."""

    where: str
    name: str
    verb: str
    submitted_ns: int


@dataclass(frozen=True)
class Steps:
    """The rate and the durations of a rank's steps."""

    per_s: float
    median_us: float
    fast_us: float
    """A tenth of the steps is faster."""
    slow_us: float
    """A tenth is slower."""
    is_told: bool
    """True: an optimizer tells steps; else they are counted by operations that come again in
    each."""


class _Prepared(NamedTuple):
    """An operation as ``RankEvents`` has it."""

    ended_ns: int
    submitted_us: float
    ended_us: float
    key: Key | None
    """None: no bucket has carried it."""
    operation: Operation | None


class Window:
    """The operations and spans of one rank in the last seconds."""

    def __init__(self) -> None:
        self._operations: deque[_Prepared] = deque()
        self._spans: deque[Span] = deque()
        self._seen: Counter[Key] = Counter()  # in buckets not long ago
        self.lost = 0

    def add(self, operations: Iterable[Recorded], spans: Iterable[Span], lost: int) -> None:
        """Add more of it, later than what is there."""
        self._operations.extend(map(self._prepare, operations))
        self._spans.extend(spans)
        self.lost += lost

    def _prepare(self, operation: Recorded) -> _Prepared:
        where, name, verb, dtype, tensors, size, bucket, _, submitted, started, ended = operation
        times = ended, submitted / 1e3, ended / 1e3
        if not bucket:
            return _Prepared(*times, None, None)
        row = label(where, name, verb)
        before = self._seen[where, bucket, row]
        self._seen[where, bucket, row] += 1
        key: Key = (where, bucket, row, before)
        if not started:
            return _Prepared(*times, key, None)
        return _Prepared(
            *times,
            key,
            Operation(row, verb.upper(), size, tensors, dtype, started / 1e3, ended / 1e3),
        )

    def forget(self, before_ns: int) -> None:
        """Forget what had ended before ``before_ns``."""
        while self._operations and self._operations[0].ended_ns < before_ns:
            key = self._operations.popleft().key
            if key is not None:
                self._seen.pop(key[:3], None)
        while self._spans and self._spans[0][3] < before_ns:
            self._spans.popleft()

    def events(self, host: str) -> RankEvents:
        """Return the rank's events as a timeline has them; times since this host was started."""
        rank = RankEvents(host)
        for name, _, start_ns, end_ns, _ in self._spans:
            span = start_ns / 1e3, end_ns / 1e3
            if name in (WAIT, WAIT_FOR_GRADIENTS):
                rank.waits.append(span)
            elif name == OPTIMIZER_STEP:
                rank.steps.append(span)
        buckets: dict[tuple[str, int], tuple[float, float]] = {}
        for _, submitted_us, _, key, operation in self._operations:
            if key is not None:
                rank.submitted[key] = submitted_us
            if key is not None and operation is not None:
                rank.operations[key] = operation
                start, end = operation.started_us, operation.ended_us
                low, high = buckets.get(key[:2], (start, end))
                buckets[key[:2]] = min(low, start), max(high, end)
        rank.carried = list(buckets.values())
        starts = [each.submitted_us for each in self._operations]
        rank.first = min([*starts, *(span[2] / 1e3 for span in self._spans)], default=rank.first)
        ends = [each.ended_us for each in self._operations]
        rank.last = max([*ends, *(span[3] / 1e3 for span in self._spans)], default=rank.last)
        return rank


def steps_of(rank: RankEvents) -> Steps | None:
    """Return its steps; None: it has made no two, as far as can be seen."""
    ends = sorted(end for _, end in rank.steps)
    is_told = len(ends) > 1
    if not is_told:
        _, ends = repeated(rank)
    durations = sorted(after - before for before, after in pairwise(ends))
    if not durations or ends[-1] <= ends[0]:
        return None
    tenth = len(durations) // 10
    return Steps(
        per_s=1e6 * len(durations) / (ends[-1] - ends[0]),
        median_us=statistics.median(durations),
        fast_us=durations[tenth],
        slow_us=durations[-1 - tenth],
        is_told=is_told,
    )


@dataclass(frozen=True)
class Look:
    """The operations that a rank had pending when it was looked at."""

    at_ns: int
    pending: Sequence[Pending]


def late_ranks(
    looks: Mapping[int, Look], before: Mapping[int, Look]
) -> dict[int, tuple[str, float]]:
    """Return, for each late rank, the operation that others wait for, and for how many seconds.

    A late rank has not submitted what others wait for. ``looks``: the look at each rank that is
    seen; ``before``: the look before that.
    """
    by_key: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for rank, look in looks.items():
        for each in look.pending:
            by_key[each.where, each.name, each.verb].setdefault(rank, each.submitted_ns)
    late: dict[int, tuple[str, float]] = {}
    for (where, name, verb), since in by_key.items():
        if where:  # what a process set carries not all ranks submit
            continue
        seen_ns = max(looks[rank].at_ns for rank in since)
        waited_s = (seen_ns - min(since.values())) / 1e9
        for rank in looks.keys() - since.keys():
            # Who was looked at later may have come to it, and be through.
            then = looks[rank] if looks[rank].at_ns <= seen_ns else before.get(rank)
            has_come = then is None or any(
                (each.where, each.name, each.verb) == (where, name, verb) for each in then.pending
            )
            if waited_s >= _LATE_S and not has_come and waited_s > late.get(rank, ("", 0.0))[1]:
                late[rank] = label(where, name, verb), waited_s
    return late


def worlds_said(worlds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how the members of a job have changed, from the worlds that a process was in."""
    said = []
    for before, after in pairwise(worlds):
        change = int(after["size"]) - int(before["size"])
        what = "anew" if not change else f"{abs(change)} {'more' if change > 0 else 'fewer'}"
        said.append(f"epoch {after['epoch']}: {after['size']} ranks, {what}")
    return said

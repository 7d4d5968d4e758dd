"""What a job has got done, and when it was whole again, by the notes of its ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAUSE_S", "Step", "back_s", "read", "samples_per_s"]

PAUSE_S = 0.5
"""A longer time without a step is a part of what a fault does, not of what steps vary by."""
_NS = 1e9


@dataclass(frozen=True)
class Step:
    """One that counts: its results are in the weights that the job ends with."""

    at_ns: int
    """When its last rank had made it; CLOCK_MONOTONIC, which is the same on all hosts here."""
    number: int
    size: int
    """How many ranks took part. Each has brought a batch of the same size."""


def read(folder: Path) -> list[Step]:
    """Return all steps, by number. Of one that was made again the last time counts.

    Files and lines are those of chaos_rank.py.
    """
    made: dict[int, tuple[int, int, int]] = {}  # epoch, moment, size
    for path in folder.glob("*.*"):
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            at_ns, number, size, _, epoch = map(int, line.split()[:5])
            before = made.get(number, (-1, 0, 0))
            if epoch > before[0]:
                made[number] = epoch, at_ns, size
            elif epoch == before[0]:
                made[number] = epoch, max(at_ns, before[1]), size
    return [Step(at_ns, number, size) for number, (_, at_ns, size) in sorted(made.items())]


def samples_per_s(steps: Iterable[Step], begin_ns: int, end_ns: int) -> float:
    """Return batches of single ranks that count, a second, of the steps in that time."""
    done = sum(step.size for step in steps if begin_ns <= step.at_ns < end_ns)
    return done * _NS / (end_ns - begin_ns)


def back_s(steps: Sequence[Step], begin_ns: int, end_ns: int, np: int) -> float | None:
    """Return seconds from a fault at ``begin_ns`` until all ``np`` ranks made steps, to stay.

    0: they always did. None: they did not until ``end_ns``, when the next fault came.
    """
    back_ns: int | None = begin_ns
    last_ns = begin_ns
    for step in steps:
        if not begin_ns <= step.at_ns < end_ns:
            continue
        if step.size < np:
            back_ns = None
        elif back_ns is None or step.at_ns - last_ns > PAUSE_S * _NS:
            back_ns = step.at_ns
        last_ns = step.at_ns
    if back_ns is None or end_ns - last_ns > PAUSE_S * _NS:
        return None
    return (back_ns - begin_ns) / _NS

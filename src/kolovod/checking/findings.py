"""The findings of a check, and their wording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kolovod.checking.facts import Facts

__all__ = [
    "GRADIENTS",
    "HINT",
    "NO_STEP",
    "OK",
    "PROBLEM",
    "UNKNOWN",
    "Finding",
    "Rank",
    "by_rank",
    "counted",
    "few",
    "names_of",
]

OK, HINT, PROBLEM, UNKNOWN = "ok", "hint", "PROBLEM", "cannot tell"
GRADIENTS = (
    "gradients",
    "gradient",
    "DistributedOptimizer",
    "DistributedGradientTape",
    "tf.kolovod",
)
"""Beginnings of the names of operations on gradients."""
NO_STEP = "no step of an optimizer of PyTorch, Keras or JAX, or of a tape, was seen"
_MOST_NAMES = 4


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """Its section in docs/check.md."""
    found: str
    verdict: str = OK
    """OK; HINT: it may be meant so; PROBLEM; UNKNOWN: this run cannot tell."""
    evidence: list[str] = field(default_factory=list)
    """Values, by rank."""
    line: str = ""
    """The script's line that it is about."""
    advice: str = ""


@dataclass(frozen=True)
class Rank:
    """The facts known of a rank when all have ended."""

    rank: int
    facts: Facts | None
    """None: its Python was not watched."""
    code: int = 0
    """Its exit code, as a shell counts."""
    is_late: bool = False
    """It was still running at the deadline."""
    was_ended: bool = False
    """The launcher has ended it: at the deadline, or since another rank had failed."""
    stdout: Sequence[str] = ()
    stderr: Sequence[str] = ()
    """Lines without their ends."""


def names_of(ranks: Iterable[int]) -> str:
    """Return the ranks as text, for example "rank 0" or "ranks 0 and 2"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def by_rank(values: Mapping[int, object]) -> list[str]:
    """Return a line of evidence for each rank."""
    return [f"rank {rank}: {value}" for rank, value in values.items()]


def few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def counted(count: int, what: str = "step") -> str:
    """Return a number with its noun, for example "1 step"."""
    return f"{count} {what}{'' if count == 1 else 's'}"

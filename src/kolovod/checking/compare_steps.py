"""Comparison of how ranks ended: after equally many steps, waiting for others, or by an error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kolovod.checking.facts import Facts
from kolovod.checking.findings import (
    NO_STEP,
    OK,
    PROBLEM,
    UNKNOWN,
    Finding,
    Rank,
    by_rank,
    counted,
    names_of,
)

__all__ = ["failed_by_itself", "failures", "has_missed_init", "steps"]

_OURS = "kolovod.errors."
_BETWEEN_RANKS = (
    "MismatchError",
    "LateRankError",
    "RankLeftError",
    "RankLostError",
    "StartTimeoutError",
    "InterruptedByRankError",
    "ShutDownError",
)
"""What a rank raises by what others do; what says most of the cause comes first."""
_REPORT = re.compile(r"^kolovod: rank (\d+)\b.* has not submitted (.*?)(?:; rank .* waits?.*)?$")
_TIME = re.compile(r", [\d.]+ s\)")


def _is_between_ranks(facts: Facts | None) -> bool:
    return facts is not None and _kind(facts) in _BETWEEN_RANKS


def _kind(facts: Facts) -> str:
    """Return the class of the error by which it ended, without Kolovod's module."""
    return facts.error_kind.removeprefix(_OURS)


def has_missed_init(facts: Facts | None) -> bool:
    """Return whether the rank has failed because it is in no world."""
    return facts is not None and facts.error_kind == f"{_OURS}NotInitializedError"


def failed_by_itself(ranks: Sequence[Rank]) -> Rank | None:
    """Return the first rank whose script has failed by something else than what other ranks do."""
    for each in ranks:
        is_explained = has_missed_init(each.facts) or _is_between_ranks(each.facts)
        if each.code and not each.was_ended and not is_explained:
            return each
    return None


def failures(ranks: Sequence[Rank]) -> list[Finding]:
    """Return that the script has failed, if it has: nothing on how it trains, but what is first."""
    failed = failed_by_itself(ranks)
    if failed is None:
        return []
    said = [line for line in failed.stderr if line.strip()][-8:]
    facts = failed.facts
    line = "" if facts is None else facts.error_line
    text = f"the script has failed on rank {failed.rank}, with exit code {failed.code}"
    return [Finding("script", text, PROBLEM, said, line, "let it run first: kolovod run -np 2")]


def steps(ranks: Sequence[Rank]) -> Finding:
    """Check whether all ranks have taken the same steps, and none waits for another in vain."""
    check = "steps"
    facts = {each.rank: each.facts for each in ranks if each.facts is not None}
    ended = by_rank({rank: _worded(each) for rank, each in facts.items()})
    failed = failed_by_itself(ranks)
    waiting = [rank for rank, each in facts.items() if _is_between_ranks(each)]
    late = [each.rank for each in ranks if each.is_late]
    counts = {each.steps for each in facts.values()}
    if failed is not None:
        return Finding(check, f"rank {failed.rank} has failed, so the others ended", UNKNOWN, ended)
    if missed := [rank for rank, each in facts.items() if has_missed_init(each)]:
        text = f"{names_of(missed)} failed without a world, so the others ended"
        return Finding(check, text, UNKNOWN, ended)
    if waiting:
        return _waiting(ranks, facts, waiting, ended)
    if late:
        text = f"{names_of(late)} had not come so far within the time"
        advice = "more time: --timeout; a rank that waits is named after --late-failure-s"
        return Finding(check, text, UNKNOWN, ended, advice=advice)
    if len(counts) > 1:
        text = "ranks have taken different numbers of steps"
        advice = "equally many batches for all ranks, or join(): docs/uneven-data.md"
        return Finding(check, text, PROBLEM, ended, advice=advice)
    count = counts.pop()
    if not count:
        return Finding(check, NO_STEP, UNKNOWN)
    return Finding(check, f"all ranks have taken {counted(count)}", OK)


def _waiting(
    ranks: Sequence[Rank], facts: Mapping[int, Facts], waiting: Sequence[int], ended: list[str]
) -> Finding:
    """Some ranks have failed since others did not do what these did."""
    kind = min((_kind(facts[rank]) for rank in waiting), key=_BETWEEN_RANKS.index)
    waiting = [rank for rank in waiting if _kind(facts[rank]) == kind]
    first = facts[waiting[0]]
    named = {facts[rank].error_rank for rank in waiting}
    culprits = sorted(rank for rank in named if rank is not None)
    if kind == "LateRankError" and len(culprits) > 1:
        text = "ranks wait for each other in different operations"
    elif kind == "LateRankError" and culprits:
        text = f"{names_of(culprits)} let the others wait"
    elif kind == "RankLeftError" and culprits:
        text = f"{names_of(culprits)} ended while {names_of(waiting)} waited for a step of all"
    else:
        text = first.error.strip().partition("\n")[0] or kind
    reports = [_REPORT.search(line) for each in ranks for line in each.stderr]
    missed = {f"rank {m[1]} has not submitted {_TIME.sub(')', m[2])}" for m in reports if m}
    line = first.error_line
    for culprit in culprits:
        if culprit in facts:
            line = facts[culprit].error_line or facts[culprit].step_line or line
            break
    advice = (
        "let all ranks run the same operations, in the same order: no step, evaluation or "
        "operation within `if rank() == 0`, and equally many batches (docs/debug-a-hang.md, "
        "docs/uneven-data.md)"
    )
    return Finding("steps", text, PROBLEM, [*ended, *sorted(missed)], line, advice)


def _worded(facts: Facts) -> str:
    count = counted(facts.steps)
    where = f", the last at {facts.step_line}" if facts.step_line else ""
    if facts.ended == "script":
        return f"{count}{where}; its script has ended"
    if facts.ended == "error":
        kind = facts.error_kind.rpartition(".")[2]
        place = f" at {facts.error_line}" if facts.error_line else ""
        return f"{count}{where}; {kind}{place}"
    return f"{count}{where}"

"""Comparison of what ranks leave behind: files, lines, numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from kolovod.checking.facts import Facts, File
from kolovod.checking.findings import (
    GRADIENTS,
    HINT,
    OK,
    PROBLEM,
    UNKNOWN,
    Finding,
    Rank,
    by_rank,
    few,
    names_of,
)
from kolovod.checking.remedies import remedy

__all__ = ["files", "metrics", "output"]

_NUMBER = re.compile(r"\d+\.\d+(?:[eE][-+]?\d+)?|\bnan\b|\binf\b")
_DIGITS = re.compile(r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MEASURED = re.compile(
    r"\d ?(?:[nuµm]?s|secs?|seconds?|min|minutes?|[kMG]i?B)\b|/s(?:ec)?\b|\btime\b",
    re.IGNORECASE,
)
"""What says how long something took, or how fast it was."""
_RANK = re.compile(r"\brank\b", re.IGNORECASE)
_INTERNAL = (*GRADIENTS, "used.", "step.", "elastic.", "parameter.", "optimizer_state")
_GUARD = "(if kolovod.rank() == 0)"


def files(known: Mapping[int, Facts]) -> list[Finding]:
    """Check whether several ranks write the same file."""
    writers: dict[str, dict[int, File]] = {}
    for rank, facts in known.items():
        for file in facts.files:
            writers.setdefault(file.path, {})[rank] = file
    if not writers:
        text = "no file was written in these steps"
        advice = (
            "--epochs 1 ends the epoch early, so that its checkpoint is seen; it is written then"
        )
        return [Finding("files", text, UNKNOWN, advice=advice)]
    found = []
    shared = {path: each for path, each in writers.items() if len(each) > 1}
    for path, of_ranks in shared.items():
        first = next(iter(of_ranks.values()))
        appends = all(file.appends for file in of_ranks.values())
        how = "append to" if appends else "write"
        found.append(
            Finding(
                "files",
                f"{names_of(of_ranks)} {how} {_short(path)}",
                HINT if appends else PROBLEM,
                line=first.line,
                advice=f"write it on one rank {_GUARD}, or give each rank a name of its own",
            )
        )
    events = {rank for each in writers.values() for rank in each if "tfevents" in str(each)}
    if len(events) > 1:
        text = f"{names_of(sorted(events))} write events for TensorBoard, each its own numbers"
        found.append(Finding("files", text, HINT, advice=f"make the writer on one rank {_GUARD}"))
    if not found:
        text = f"no two ranks write the same file ({few([_short(path) for path in writers])})"
        found.append(Finding("files", text, OK))
    return found


def _short(path: str) -> str:
    try:
        short = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if short.startswith("..") else short


def metrics(ranks: Sequence[Rank]) -> Finding:
    """Check whether the numbers that are shown are those of all ranks together."""
    check = "metrics"
    facts = next(each.facts for each in ranks if each.facts is not None)
    printing = [each.rank for each in ranks if any(map(_NUMBER.search, each.stdout))]
    if facts.averages:
        return Finding(check, f"{facts.averages} averages those of an epoch over ranks")
    if facts.operations:
        places = [f"{each.verb} at {each.line}" for each in facts.operations]
        return Finding(check, f"the script combines values of ranks: {few(places)}")
    internal: tuple[str, ...] = _INTERNAL
    if facts.framework == "tensorflow" and facts.steps:  # what a tape sends outside of a graph
        internal += ("unnamed.",)
    others = [name for name in facts.reductions if not name.startswith(internal)]
    is_in_programs = not facts.steps or facts.framework in ("jax", "tensorflow")
    if others and is_in_programs:
        named = few([f"'{name}'" for name in others])
        return Finding(check, f"ranks combine more than gradients: {named}")
    is_seen = facts.steps > 0  # else operations may be inside programs of JAX or TensorFlow
    if len(printing) == 1 and len(ranks) > 1 and facts.world_size is not None and is_seen:
        lines = [line for line in ranks[printing[0]].stdout if _NUMBER.search(line)]
        text = (
            f"only rank {printing[0]} prints numbers, and the script has combined none, so they "
            "are of that rank's data"
        )
        known = {each.rank: each.facts for each in ranks if each.facts is not None}
        advice = remedy(check, known)
        return Finding(check, text, HINT, [lines[0].strip()[:100]], advice=advice)
    if printing:
        verb = "prints" if len(printing) == 1 else "print"
        text = f"{names_of(printing)} {verb} numbers, and that ranks combine some was not seen"
        return Finding(check, text, UNKNOWN)
    return Finding(check, "no numbers were printed, or combined, in these steps", UNKNOWN)


def output(ranks: Sequence[Rank]) -> list[Finding]:
    """Check whether all ranks print the same lines."""
    printed = [
        {
            _DIGITS.sub("#", line).strip(): line.strip()
            for line in each.stdout
            if line.strip() and not _RANK.search(line)
        }
        for each in ranks
    ]
    common = [form for form in printed[0] if all(form in other for other in printed)]
    if len(ranks) < 2 or not common:
        return [Finding("output", "no line is printed by all ranks")]
    text = f"all ranks print {len(common)} line{'s' if len(common) > 1 else ''} alike"
    unlike = [form for form in common if len({each[form] for each in printed}) > 1]
    evidence = [printed[0][form][:100] for form in common[:2]]
    if unlike:
        values = {
            rank.rank: each[unlike[0]][:100] for rank, each in zip(ranks, printed, strict=True)
        }
        evidence = by_rank(values)
        text += f", but for numbers in {'it' if len(common) == 1 else f'{len(unlike)} of them'}"
        if any(map(_MEASURED.search, values.values())):
            text += "; times and speeds are each rank's own, as expected"
        elif all(map(_NUMBER.search, values.values())):
            text += (
                "; expected where each rank shows the loss of its own data, not of one that is "
                "averaged"
            )
    return [Finding("output", text, HINT, evidence, advice=f"print on one rank {_GUARD}")]

"""The findings for people, and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kolovod.checking.findings import HINT, PROBLEM, UNKNOWN, Finding
from kolovod.documentation import linked

__all__ = ["as_json", "summary", "text"]

_WIDTH = 100
_MARGIN = 29  # of what a finding says: behind its verdict and its check


def text(findings: Sequence[Finding]) -> str:
    """Return a line for each finding; below it the evidence, the script's line, and what to do."""
    lines = []
    for finding in findings:
        head = f"{finding.verdict:11}  {finding.check:15} "
        where = f" ({finding.line})" if finding.line else ""
        lines += _wrapped(head, finding.found + where)
        for each in finding.evidence:
            lines += _wrapped(" " * (_MARGIN + 2), each)
        is_open = finding.verdict in (PROBLEM, HINT, UNKNOWN)
        if is_open and finding.advice:
            advice = linked(f"{finding.advice} [docs/check.md#{finding.check}]")
            lines += _wrapped(f"{'':{_MARGIN}}-> ", advice)
    return "\n".join(lines)


def _wrapped(head: str, said: str) -> list[str]:
    rest = " " * max(len(head), _MARGIN)
    return textwrap.wrap(
        said, _WIDTH, initial_indent=head, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each kind, for example "2 problems, 1 hint"."""
    counts = Counter(finding.verdict for finding in findings)
    parts = []
    for verdict, name in ((PROBLEM, "problem"), (HINT, "hint")):
        count = counts[verdict]
        parts.append(f"{count or 'no'} {name}{'' if count == 1 else 's'}")
    if unknown := counts[UNKNOWN]:
        parts.append(f"{unknown} that this run cannot tell")
    return ", ".join(parts)


def as_json(findings: Sequence[Finding], ranks: int, exit_code: int) -> dict[str, Any]:
    """Return the object that ``--json`` writes."""
    listed = [{**asdict(each), "page": linked(f"docs/check.md#{each.check}")} for each in findings]
    return {"ranks": ranks, "exit_code": exit_code, "findings": listed}

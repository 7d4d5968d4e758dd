"""A proposal as text for a terminal. PURE."""

from __future__ import annotations

import difflib
import io
import textwrap
import tokenize
from collections.abc import Sequence

from kolovod.documentation import linked
from kolovod.migrate.edits import Remark
from kolovod.migrate.proposal import Proposal

__all__ = ["diff", "remarks"]

_WIDTH = 100
_COLORS = {"+": "32", "-": "31", "@": "36"}


def diff(path: str, old: bytes, proposal: Proposal, *, colored: bool) -> str:
    """Return a unified diff, as patch takes it when it is not colored."""
    lines = difflib.unified_diff(_lines(old), _lines(proposal.new), path, path)
    shown = []
    for line in lines:
        text = line.rstrip("\n")
        if colored and (color := _COLORS.get(text[:1])):
            text = f"\x1b[{color}m{text}\x1b[0m"
        shown.append(text)
        if not line.endswith("\n"):
            shown.append("\\ No newline at end of file")
    return "\n".join(shown)


def _lines(content: bytes) -> list[str]:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode(encoding)
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [text.split("\n")[-1]] * (
        not text.endswith("\n")
    )


def remarks(title: str, found: Sequence[Remark]) -> str:
    """Return remarks with their lines; "" if there are none."""
    if not found:
        return ""
    lines = [
        textwrap.fill(
            linked(each.text),
            _WIDTH,
            initial_indent=f"  {f'line {each.line}' if each.line else '':<9} ",
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in found
    ]
    return "\n".join([title, *lines])

"""Writes the knob table of docs/configuration.md; with --check, says whether it is current."""

from __future__ import annotations

from pathlib import Path

from generated import bring_up_to_date

from kolovod.config import KNOBS, Knob

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN = "<!-- made by scripts/knobs.py from src/kolovod/config.py: begin -->"
END = "<!-- end -->"


def _row(knob: Knob) -> str:
    default = f"{knob.default:g}" if isinstance(knob.default, float) else str(knob.default)
    value = " or ".join(f"`{choice}`" for choice in knob.choices) or knob.unit
    also = [f"`{alias}`" for alias in knob.aliases]
    if knob.off:
        also.append(f"`{knob.off}` (1 means 0 here)")
    flag = knob.flag and f"`{knob.flag}`"
    cells = [f"`{knob.environment}`", flag, value, default, ", ".join(also), knob.text]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the knobs as a Markdown table."""
    head = "| variable | flag of `kolovod run` | value | default | also read | meaning |"
    return "\n".join([head, "|---|---|---|---|---|---|", *map(_row, KNOBS)])


def page_with_table(page: str) -> str:
    """Return the page with the table between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: the marks '{BEGIN}' and '{END}' are missing")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Returns 1 if --check finds a difference."""
    return bring_up_to_date(PAGE, page_with_table(PAGE.read_text(encoding="utf-8")), "knobs.py")


if __name__ == "__main__":
    raise SystemExit(main())

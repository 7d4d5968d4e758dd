"""The screen of ``kolovod top``, drawn by rich."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kolovod.launch.running_jobs import RunningJob
from kolovod.observe.live.picture import Picture, RankPicture
from kolovod.observe.units import bytes_text, rate_text, time_text
from kolovod.printable import printable

__all__ = ["screen"]

_BAR = 10
_MOST_EVENTS = 4


def screen(
    job: RunningJob,
    picture: Picture,
    late_at: Mapping[int, str],
    selected: int | None = None,
    stack: str = "",
) -> RenderableType:
    """Return a picture of a job. ``late_at``: by pid of a late rank, the line that it is at.

    ``selected``: the position of a rank, whose ``stack`` is shown unless it is empty.
    """
    parts: list[RenderableType] = [_head(job, picture), _ranks(job, picture, selected)]
    parts += [Text(line) for line in _lateness(picture, late_at)]
    parts += [Text(f"link to {link.host}: {_link(link.bytes_per_s, link.measured_bytes_per_s)}")
              for link in picture.links]  # fmt: skip
    parts += [Text(f"  {event}") for event in picture.events[-_MOST_EVENTS:]]
    parts += [Text(f"! {warning}", style="yellow") for warning in picture.warnings]
    if selected is not None:
        if stack:
            parts.append(Panel(Text(stack), title=f"pid {picture.ranks[selected].pid}"))
        parts.append(Text("q quit   up/down choose a rank   s its stack", style="dim"))
    return Group(*parts)


def _head(job: RunningJob, picture: Picture) -> Text:
    hosts = len(picture.hosts) or job.hosts
    size = picture.size or job.size
    steps = [each.steps for each in picture.ranks if each.steps is not None]
    said = [
        f"job {job.name}",
        f"{size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {len(job.ranks)} here",
    ]
    if job.is_elastic:
        said.append(f"elastic, epoch {picture.epoch}")
    if picture.backend not in ("", "native"):
        said.append(picture.backend)
    if steps:
        one = min(steps, key=lambda each: each.per_s)
        told = "" if one.is_told else " (by what comes again)"
        said.append(
            f"{one.per_s:.3g} steps/s{told}, {time_text(one.fast_us)} to {time_text(one.slow_us)}"
        )
    if picture.operations_per_s:
        said.append(
            f"{picture.operations_per_s:.3g} operations/s, {bytes_text(int(picture.bytes_per_s))}/s"
        )
    if any(dtype for dtype in picture.dtypes):
        said.append(", ".join(filter(None, picture.dtypes[:3])))
    command = shlex.join(job.ranks[0].command) if job.ranks else ""
    text = Text("   ".join(said), style="bold")
    text.append(f"\n{printable(' '.join(command.split()))}"[:300], style="not bold dim")
    return text


def _ranks(job: RunningJob, picture: Picture, selected: int | None) -> Table:
    several = len(picture.hosts) > 1
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(job.kind, justify="right")
    if several:
        table.add_column("host")
    for name in ("pid", "step", "compute", "waiting", "communication", "hidden", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("held up", "CPU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for position, each in enumerate(picture.ranks):
        row = [_name(job, each), *([escape(each.host)] if several else []), str(each.pid)]
        row += [
            time_text(each.steps.median_us) if each.steps is not None else "-",
            _share(each.compute, bar=True), _share(each.waiting), _share(each.communication),
            _share(each.hidden), str(each.last), _share(each.held_up),
            f"{each.cpu:.0%}", bytes_text(each.memory_bytes), escape(each.problem),
        ]  # fmt: skip
        style = "reverse" if position == selected else ("yellow" if each.late else "")
        table.add_row(*row, style=style)
    return table


def _name(job: RunningJob, each: RankPicture) -> str:
    """Return its slot, and its rank where that is another number."""
    if not job.is_elastic or each.rank in (None, each.number):
        return str(each.number)
    return f"{each.number} (rank {each.rank})"


def _share(value: float | None, *, bar: bool = False) -> str:
    if value is None:
        return "-"
    share = min(1.0, max(0.0, value))
    drawn = "█" * round(share * _BAR)
    return f"{drawn}{'·' * (_BAR - len(drawn))} {share:>4.0%}" if bar else f"{share:.0%}"


def _lateness(picture: Picture, late_at: Mapping[int, str]) -> list[str]:
    said = []
    for each in picture.ranks:
        if each.late:
            where = late_at.get(each.pid, "")
            said.append(
                f"late: others wait {each.late_s:.0f} s for rank {each.rank} in {each.late}"
                + (f"; it is at {where}" if where else "")
            )
    return said


def _link(bytes_per_s: float, measured_bytes_per_s: float) -> str:
    text = f"{rate_text(bytes_per_s)} sent"
    if measured_bytes_per_s:
        share = bytes_per_s / measured_bytes_per_s
        text += f", {share:.0%} of the {rate_text(measured_bytes_per_s)} that it carries"
    return text

"""A plan as a picture: efficiency by hosts, with intervals; what is extrapolated is hollow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kolovod.observe import svg
from kolovod.observe.units import rate_text
from kolovod.planning.plan import Plan, Row

__all__ = ["draw"]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 66, 76
_CURVES = {"plain": "blue", "changed": "orange"}


def draw(plan: Plan) -> str:
    """Return the SVG."""
    hosts = sorted({row.hosts for row in plan.rows})
    parts = _ground(plan, hosts)
    for name, variant in zip(_CURVES, plan.variants, strict=False):
        rows = [row for row in plan.rows if row.variant == variant.name]
        parts += _curve(name, rows, hosts)
    for number, (name, variant) in enumerate(zip(_CURVES, plan.variants, strict=False)):
        at = _LEFT + 250 * number
        parts.append(svg.text(at, _HEIGHT - 32, f"● {variant.name}", name, size=11))
    note = "Bars: the interval. Hollow: extrapolated, beyond four times what was measured."
    parts.append(svg.text(_LEFT, _HEIGHT - 14, note, "quiet", size=11))
    return svg.page(_WIDTH, _HEIGHT, svg.style(_CURVES), parts)


def _x(number: int, hosts: Sequence[int]) -> float:
    """Return where a number of hosts is, by its logarithm."""
    low, high = math.log(hosts[0]), math.log(hosts[-1])
    share = 0.5 if low == high else (math.log(number) - low) / (high - low)
    first, last = _LEFT + 24, _WIDTH - _RIGHT - 24
    return first + (last - first) * share


def _y(efficiency: float) -> float:
    share = min(max(efficiency, 0.0), 1.0)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * share


def _ground(plan: Plan, hosts: Sequence[int]) -> list[str]:
    cluster = plan.measured.cluster
    link = f"links of {rate_text(plan.link.bytes_per_s)}" if hosts[-1] > 1 else "one host"
    under = (
        f"{link}; from {len(plan.measured.steps_s)} steps of {cluster.ranks} ranks on "
        f"{cluster.hosts} hosts"
    )
    parts = [
        svg.text(20, 28, "Efficiency by number of hosts", size=17, bold=True),
        svg.text(20, 48, under, "quiet"),
    ]
    for tenths in range(0, 11, 2):
        y = _y(tenths / 10)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" '
                     f'y2="{y:.1f}"/>')  # fmt: skip
        parts.append(svg.text(_LEFT - 8, y + 4, f"{tenths * 10} %", "quiet", "end", 11))
    return parts + [
        svg.text(_x(number, hosts), _HEIGHT - _BOTTOM + 18, f"{number}", "quiet", "middle", 11)
        for number in hosts
    ]


def _curve(name: str, rows: Sequence[Row], hosts: Sequence[int]) -> list[str]:
    points = [(_x(row.hosts, hosts), _y(row.efficiency)) for row in rows]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline class="{name}" points="{path}"/>']
    for row, (x, y) in zip(rows, points, strict=True):
        low, high = (_y(end) for end in row.interval)
        kind = f"{name} hollow" if row.beyond else name
        parts.append(
            f'<line class="{name}" x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'
        )
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{row.hosts} hosts: '
            f"{row.efficiency:.0%}, {row.bottleneck}</title></circle>"
        )
        parts.append(svg.text(x + 7, y - 7, f"{row.efficiency:.0%}", name, size=10))
    return parts

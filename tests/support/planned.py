"""Timelines of trainings that never were, for tests of ``kolovod plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kolovod.core.spans import OPTIMIZER_STEP, WAIT_FOR_GRADIENTS, Span
from kolovod.observe.recorder import Batch, Operation
from kolovod.observe.trace import Trace
from kolovod.observe.whereabouts import Whereabouts

MS = 1_000_000
MIB = 1 << 20
HERE = Whereabouts("m", 4.0, "f")


def events(
    hosts: Sequence[str] = ("a", "b"),
    *,
    steps: int = 10,
    compute_ms: float = 40.0,
    at_ms: Sequence[float] = (20.0, 40.0),
    bytes_: int = MIB,
    carried_ms: float = 10.0,
    dtype: str = "float32",
    carrier: str = "",
    slower_ms: Sequence[float] = (),
    cpu_share: float = 1.0,
    at: Whereabouts | None = HERE,
    machines: Sequence[str] = (),
    link: tuple[float, float] | None = (125e6, 1e-4),
) -> list[dict[str, Any]]:
    """A training of one rank for each of ``hosts``.

    Each computes ``compute_ms``, and submits ``bytes_`` at each of ``at_ms``, each of which is
    carried for ``carried_ms``, one after the other; then it waits for the last, and the optimizer
    steps, in no time. ``slower_ms``: by rank, what it computes longer before its first gradient.
    """
    trace = Trace(0, 0)
    found = trace.opening()
    more = dict(enumerate(slower_ms))
    for rank, host in enumerate(hosts):
        spans: list[Span] = []
        operations: list[Operation] = []
        begin = end = cpu = 0.0
        latest = max([0.0, *slower_ms])
        for step in range(steps):
            free = 0.0
            for number, when in enumerate(at_ms):
                started = max(begin + when + latest, free)
                free = started + carried_ms
                submitted = begin + when + more.get(rank, 0.0)
                operations.append(
                    (carrier, f"g{number}", "allreduce", dtype, 1, bytes_,
                     step * len(at_ms) + number + 1, True,
                     *(int(ms * MS) + 1 for ms in (submitted, started, free)))
                )  # fmt: skip
            computed = begin + compute_ms + more.get(rank, 0.0)
            end = max(free, computed)
            cpu += cpu_share * (computed - begin)
            spans.append((WAIT_FOR_GRADIENTS, "MainThread", *_ns(computed, end), _cpu(cpu, cpu)))
            spans.append((OPTIMIZER_STEP, "MainThread", *_ns(end, end + 1e-3), _cpu(cpu, cpu)))
            begin = end + 1e-3
        where = at
        if where is not None and machines:
            where = where._replace(machine=machines[rank])
        found += trace.add(rank, host, Batch(operations, spans), where)
    if link is not None:
        found += trace.links(*link)
    return found


def _ns(*ms: float) -> tuple[int, ...]:
    return tuple(int(each * MS) for each in ms)


def _cpu(before: float, after: float) -> tuple[int, ...]:
    return (*_ns(before, after), *_ns(before, after))


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    """As a timeline's file."""
    path.write_text(json.dumps(found))
    return path

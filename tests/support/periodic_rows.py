"""The elastic step of jobs that communicate seldom: LocalSGD and DiLoCo, and whoever dies wherever.

As ``elastic_rows.py``: ranks are threads, and ``periodic_elastic.Replay`` makes all steps again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from elastic_threads import TICKETS, Job, Life, arrange, own_steps
from hypothesis import strategies as st
from periodic_elastic import CASES, Replay, begin, compute, sums

from kolovod.gradients import periodic
from kolovod.torch import TorchCollectives, TorchFrontend

RANKS, STEPS, SEED = 3, 19, 5
Found = tuple[list[tuple[int, ...]], list[list[int]]]


class PeriodicRow(NamedTuple):
    """Who dies where: between exchanges (in a step), while it sends, or at a ticket."""

    case: str
    place: str
    number: int
    """Of the step, from 1, or of the exchange, from 0."""
    victim: int


@st.composite
def periodic_rows(draw: Any) -> PeriodicRow:
    """Any."""
    place = draw(st.sampled_from(("between", "sending", *TICKETS)))
    most = 12 if place == "between" else 3
    case, number = draw(st.sampled_from(sorted(CASES))), draw(st.integers(1, most))
    return PeriodicRow(case, place, number, draw(st.integers(0, RANKS - 1)))


def options(row: PeriodicRow) -> list[tuple[str, Any]]:
    """For ``exchange_rows.chosen``."""
    return [*row._asdict().items()]


def run(row: PeriodicRow) -> None:
    """Train, and compare each step of each survivor."""
    results = Job([0] * RANKS, TorchFrontend).run(lambda life: _train(row, life), [[row.victim]])
    survivors = {m: found for m, found in enumerate(results) if m != row.victim}
    first, second = survivors.values()
    assert first[0] == second[0]
    assert len(first[0][0]) == RANKS or row.place == "between"
    assert first[0][-1] == tuple(survivors)
    assert first[1][-1] == second[1][-1]  # after synchronize
    replay = Replay(row.case, SEED, tuple(range(RANKS)), first[0])
    for step in range(STEPS + 1):
        if step < STEPS:
            replay.step()
        else:
            replay.synchronize()
        for member, (_, found) in survivors.items():
            assert replay.sums(member) == found[step], f"step {step + 1} of member {member}"
    assert not replay.log


def _train(row: PeriodicRow, life: Life) -> Found:
    verbs = TorchCollectives(TorchFrontend(), life.world)
    model, inner, way = begin(row.case, SEED, verbs)
    ongoing = own_steps()
    ongoing._entered = way.enter_world
    ongoing.begin()
    if row.place in TICKETS:
        arrange(row.place, row.number, life, [row.victim], range(RANKS))
    is_victim, left = life.member == row.victim, [row.number]
    if is_victim and row.place == "sending":
        start = way._exchange.start

        def counted(*arguments: Any, **options: Any) -> periodic.Sent:
            sent: periodic.Sent = start(*arguments, **options)
            attempt = sent.attempt

            def dies() -> list[Any]:
                left[0] -= 1
                if left[0] < 0:
                    life.die()
                return attempt()

            sent.attempt = dies  # type: ignore[method-assign]
            return sent

        way._exchange.start = counted
    log: list[tuple[int, ...]] = []
    found = []

    def note() -> None:
        assert way.has_exchanged == bool(ongoing.all_counted)
        log.extend(ongoing.all_counted)
        ongoing.all_counted = []
        way.committed()
        found.append(sums(model, way))

    for step in range(1, STEPS + 1):
        if is_victim and row.place == "between" and step == row.number:
            life.die()
        compute(model, life.member, step)
        inner.step()
        note()
    way.synchronize()
    note()
    return log, found

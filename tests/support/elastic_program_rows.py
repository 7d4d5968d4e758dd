"""Cases of the elastic step for TensorFlow, Keras and JAX: how they are drawn, and share jobs.

A case is a row of the exchange (``exchanges.py``) with deaths. Cases share a job, one after the
other: who is left of one has the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import exchange_rows
import numpy as np
from elastic_deaths import Death, without
from elastic_threads import TICKETS
from exchange_rows import JAX, KERAS, TENSORFLOW, Has, options_of, rows
from exchanges import Parameter, Row, Step
from hypothesis import strategies as st

STEPS = 6
RANKS = 5
HOSTS = ((0, 0, 0, 0, 0), (0, 0, 1, 1, 1))
PLACES = ("backward", "sending", "sent", *TICKETS, "update", "between", "commit", "committed")
"""Before the gradients are exchanged; when the others have sent theirs; when it has sent its own
first ones; three at the ticket (``elastic_threads.py``); with the results, before the update; after
it, before the commit; at the begin and at the end of the commit. A second death may be "dealing":
while a commit shares the first lost rank's samples out."""


class Case(NamedTuple):
    """A row of the exchange, and its deaths in order."""

    row: Row
    deaths: tuple[Death, ...]
    members: tuple[int, ...] = ()
    """Who is alive at its begin; of ``packed``, as who dies."""


def _on_processes(has: Has, *programs: str) -> Has:
    compressions = ("none", "none", "fp16", "bf16")
    return has._replace(
        worlds=(HOSTS[:1], HOSTS[1:]), compressions=compressions, programs=programs or has.programs
    )


OF_TENSORFLOW = _on_processes(TENSORFLOW)
OF_KERAS = _on_processes(KERAS, "fit", "fit eagerly", "applied")
OF_JAX = _on_processes(JAX, "jitted", "eager", "allreduce", "jitted with a loss")


@st.composite
def cases(draw: Any, has: Has) -> Case:
    """Any; who dies is decided by ``packed``, and until then a number of ranks."""
    of = st.sampled_from
    row: Row = draw(rows(has))
    if row.predivide == 3.0:
        row = row._replace(predivide=2.0)
    if row.program in ("allreduce", "jitted with a loss"):  # which have no more of the table
        row = row._replace(predivide=1.0, passes=1)
    if has is OF_KERAS and isinstance(row.groups, tuple):  # of variables that are not made yet
        row = row._replace(groups=2)
    if all(0 in parameter.shape for parameter in row.parameters):  # which tell nothing
        row = row._replace(parameters=(*row.parameters, Parameter((3,))))
    # Between two hosts, and alone in a program, what is narrow is rounded elsewhere.
    exact = row.exact or row.compression != "none"
    row = row._replace(steps=(Step(),) * STEPS, exact=exact)
    first = draw(st.integers(1, 2))
    deaths = [Death(first, draw(of(PLACES)), (1,) * draw(of((1, 1, 2))))]
    if draw(st.integers(0, 3)):
        place = draw(of((*PLACES, "dealing", "dealing")))
        deaths.append(Death(first + (1 if place == "dealing" else 2), place, (1,)))
    if row.program.endswith("loss"):  # whose steps have a second ticket
        deaths = [
            death._replace(ticket=draw(st.integers(0, 1)))
            if death.place in (*TICKETS, "update")
            else death
            for death in deaths
        ]
    return Case(row, tuple(deaths))


def options(case: Case) -> list[tuple[str, Any]]:
    """For ``exchange_rows.chosen``."""
    first, *more = case.deaths
    found = [("place", first.place), ("victims", len(first.victims)), ("ticket", first.ticket)]
    then = more[0].place if more else ""
    return [*found, ("then", then), *(o for o in options_of(case.row) if o[0] != "way")]


def chosen(has: Has, count: int) -> list[Case]:
    """So many cases of a front end, the same in each run.

    The first few have all programs and places, and the first program at all tickets.
    """
    pool = exchange_rows.chosen(cases(has), options, 100 + 6 * count)
    found: list[Case] = []
    waiting: set[str] = set()
    for _ in range(count):
        at_tickets = (f"{place} of {has.programs[0]}" for place in TICKETS)
        waiting = waiting or {*PLACES, "dealing", *has.programs, *at_tickets}
        best = max(pool, key=lambda case: len(waiting & _shown(case)))
        pool.remove(best)
        waiting -= _shown(best)
        found.append(best)
    return found


def _shown(case: Case) -> set[str]:
    places, program = {death.place for death in case.deaths}, case.row.program
    return {program, *places, *(f"{place} of {program}" for place in places)}


def packed(found: Sequence[Case]) -> list[list[Case]]:
    """Jobs of cases, each with those that the ones before have left: of ``RANKS`` at most."""
    waiting = sorted(found, key=_lost, reverse=True)
    jobs = []
    while waiting:
        together, left = [waiting[0]], RANKS
        while together[-1] in waiting:
            waiting.remove(together[-1])
            left -= _lost(together[-1])
            fits = (c for c in waiting if c.row.worlds == together[0].row.worlds)
            together += [c for c in fits if _lost(c) + _survivors(c) <= left][:1]
        # A process that none of the cases needs would have each of them for nothing.
        used = RANKS - left + _survivors(together[-1])
        alive, job = tuple(range(max(3, used))), []
        for case in together:
            job.append(_decided(case, alive))
            for death in job[-1].deaths:
                alive = without(alive, death)
        jobs.append(job)
    return jobs


def _decided(case: Case, alive: tuple[int, ...]) -> Case:
    """``case``, where those who die are of ``alive``."""
    draw, deaths, left = np.random.default_rng(case.row.seed), [], alive
    for death in case.deaths:
        drawn = draw.choice(left, len(death.victims), replace=False)
        deaths.append(death._replace(victims=tuple(sorted(map(int, drawn)))))
        left = without(left, deaths[-1])
    return Case(case.row, tuple(deaths), alive)


def _lost(case: Case) -> int:
    return sum(len(death.victims) for death in case.deaths)


def _survivors(case: Case) -> int:
    """How many there have to be: of a torn ticket one who has passed it, and one who has not."""
    return 2 if "torn" in _shown(case) else 1

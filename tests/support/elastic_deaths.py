"""Who dies in which step and where in it, and whom a step may count therefore.

What tables of the elastic step have in common, whatever the ranks are: threads
(``elastic_rows.py``) or processes (``elastic_programs.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NOT_COUNTED = ("backward", "sending", "sent", "results", "copies")
"""Places before a rank has passed the ticket: the step is one of the others alone."""


class Death(NamedTuple):
    """Who dies where."""

    step: int
    place: str
    victims: tuple[int, ...]
    ticket: int = 0
    """Of the step, for a place at a ticket: some steps have several."""


def check_counted(
    everyone: Sequence[int], deaths: Sequence[Death], counted_by_step: Sequence[tuple[int, ...]]
) -> None:
    """Nobody is counted after its death, and everybody before.

    Whose ticket only those have passed that die next, that step is one of the others alone.
    """
    alive = tuple(everyone)
    by_step = {death.step: death for death in deaths}
    for number, counted in enumerate(counted_by_step):
        death, following = by_step.get(number), by_step.get(number + 1)
        left = alive if death is None else without(alive, death)
        allowed = [left]
        if death is not None and (death.place not in NOT_COUNTED or death.ticket):
            allowed.append(alive)
        if following is not None:
            allowed.append(without(left, following))
        assert counted in allowed, (number, counted)
        alive = left


def without(members: Sequence[int], death: Death) -> tuple[int, ...]:
    """Who of ``members`` is left."""
    return tuple(member for member in members if member not in death.victims)

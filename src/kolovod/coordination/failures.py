"""Worlds that fail though no member has ended: whom their members could not reach.

A connection that breaks is made again by forming a world anew of the same members. Where only two
hosts cannot reach each other, the coordinator hears of all, and that world would fail again and
again; so one of those that could not be reached is left out of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kolovod.coordination.consensus import World

__all__ = ["Failure", "Failures"]

_IN_A_ROW_S = 30.0
"""Between the failures of two worlds at most, for the second to be of the same cause."""


@dataclass
class Failure:
    """The failure of one world."""

    epoch: int
    numbers: frozenset[int]
    reason: str
    since_s: float
    unreached: dict[int, int] = field(default_factory=dict)
    """The member that each member could not reach; many only repeat what they were told."""


class Failures:
    """The last failure, and the one before if the same members have failed twice in a row."""

    def __init__(self) -> None:
        self._last: Failure | None = None
        self._before: Failure | None = None

    def note(
        self, world: World, reason: str, now_s: float, member: int, unreached: int | None
    ) -> None:
        """Note that ``member`` says that ``world`` has failed.

        ``unreached``: the member that it could not reach, if any.
        """
        last = self._last
        if last is None or last.epoch != world.epoch:
            is_same = last is not None and last.numbers == world.numbers
            is_soon = last is not None and now_s - last.since_s < _IN_A_ROW_S
            self._before = last if is_same and is_soon else None
            self._last = last = Failure(world.epoch, world.numbers, reason, now_s)
        if unreached in world.numbers and unreached != member:
            assert unreached is not None
            last.unreached[member] = unreached

    def of(self, world: World) -> Failure | None:
        """Return why ``world`` works no more; None: nobody says that it does not."""
        return self._last if self._last and self._last.epoch == world.epoch else None

    def to_leave_out(self, world: World, without_state: Collection[int]) -> int | None:
        """Return the member that most others could not reach, in both worlds; of two the later one.

        One of those ``without_state`` is preferred; the only member that has the state is never
        chosen.
        """
        last, before = self.of(world), self._before
        if last is None or before is None or not last.unreached or not before.unreached:
            return None
        times = Counter([*last.unreached.values(), *before.unreached.values()])
        found = [n for n in times if world.numbers.difference(without_state, {n})]
        return max(found, key=lambda n: (n in without_state, times[n], n), default=None)

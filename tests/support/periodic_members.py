"""DiLoCo of processes that come and go, in one process and in NumPy, as ``kolovod.jax`` does it.

There what is kept for a fragment is sent by the step that applies it, or before the ranks leave
their world for one that is larger. The arithmetic is that of ``periodic_replay``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from periodic_replay import OUTER_MOMENTUM, OUTER_RATE, _mean, _Rank, start

Members = tuple[int, ...]


class Replay:
    """All processes, given whose part was in each exchange and who came when."""

    def __init__(
        self,
        members: Members,
        log: Sequence[Members],
        every: int,
        *,
        fragments: Sequence[Sequence[int]] = ((0, 1, 2),),
        delay: int = 0,
        share: float = 0.0,
    ) -> None:
        self.ranks: dict[int, Any] = {member: _Rank() for member in members}
        self.log = list(log)
        self.every, self.fragments, self.delay, self.share = every, fragments, delay, share
        self.common = start()
        self.momentum = [np.zeros_like(p) for p in self.common]
        self.steps = 0
        self.sent: dict[int, dict[int, list[Any]]] = {}  # by fragment and member
        self.means: dict[int, list[Any]] = {}
        self.equal_after = dict.fromkeys(range(len(fragments)), 0)

    def step(self) -> None:
        """One of each process, and what is exchanged in it."""
        self.steps += 1
        for member, rank in self.ranks.items():
            rank.step(rank.gradients(member % 5, self.steps - 1))
        for number in range(len(self.fragments)):
            if self._is_turn(self.steps, number):
                self._send(number)
            if number in {*self.sent, *self.means} and self._is_turn(
                self.steps - self.delay, number
            ):
                self._apply(number, self.share)

    def synchronize(self) -> None:
        """At the end."""
        for number in range(len(self.fragments)):
            if number not in {*self.sent, *self.means}:
                if self.equal_after[number] == self.steps:
                    continue
                self._send(number)
            self._apply(number, 0.0)

    def join(self, members: Members) -> None:
        """These are in the world from now on; who comes is a copy of the first."""
        if not set(members) - set(self.ranks):
            return
        for number in sorted(self.sent):
            self._exchange(number)
        for member in members:
            if member not in self.ranks:
                self.ranks[member] = copy.deepcopy(self.ranks[members[0]])

    def _is_turn(self, steps: int, number: int) -> bool:
        turn = (number + 1) * self.every // len(self.fragments)
        return steps >= turn and (steps - turn) % self.every == 0

    def _send(self, number: int) -> None:
        self.sent[number] = {
            member: [self.common[p] - rank.parameters[p] for p in self.fragments[number]]
            for member, rank in self.ranks.items()
        }

    def _exchange(self, number: int) -> None:
        who, sent = self.log.pop(0), self.sent.pop(number)
        self.ranks = {member: self.ranks[member] for member in who}  # others are gone
        self.means[number] = _mean([sent[member] for member in who])

    def _apply(self, number: int, share: float) -> None:
        if number in self.sent:
            self._exchange(number)
        if not share:
            self.equal_after[number] = self.steps
        for place, gradient in zip(self.fragments[number], self.means.pop(number), strict=True):
            self.momentum[place] = gradient + OUTER_MOMENTUM * self.momentum[place]
            change = gradient + OUTER_MOMENTUM * self.momentum[place]
            self.common[place] = self.common[place] - OUTER_RATE * change
            for rank in self.ranks.values():
                own = rank.parameters[place]
                rank.parameters[place] = (1 - share) * self.common[place] + share * own

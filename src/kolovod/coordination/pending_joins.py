"""Processes that come to a coordinator: who waits for a number, and who came last to each slot.

Where an external launcher starts the processes, a process that comes to a slot proves that the one
before it there has ended: the launcher starts no second one while the first runs.
"""

from __future__ import annotations

import select
from dataclasses import dataclass

from kolovod.coordination.consensus import Member, Record
from kolovod.coordination.protocol import Hello, Left
from kolovod.net.channel import Channel

__all__ = ["PendingJoins", "Newcomer"]


@dataclass(frozen=True)
class Newcomer:
    """A process that has said hello, and was not let in yet."""

    channel: Channel
    hello: Hello
    known: frozenset[int]
    """Members of the world that was the newest when it came: it can follow only these in its slot.
    A later one may be its own replacement, let in by another coordinator."""


class PendingJoins:
    """The joins that wait at one coordinator; its lock guards them."""

    def __init__(self) -> None:
        self._waiting: list[Newcomer] = []
        self._last: dict[int, int] = {}  # by slot, the number of the member that has come last
        self._by_process: dict[int, int] = {}  # the numbers of members, by their launcher's
        self._left: dict[int, Left] = {}  # by slot, what who comes has found there

    def add(self, newcomer: Newcomer) -> None:
        """Let a newcomer wait."""
        hello = newcomer.hello
        self._waiting.append(newcomer)
        if hello.number is None and hello.left is not None:
            self._left[hello.slot] = hello.left

    def take(self) -> list[Newcomer]:
        """Return all that wait and are still there; they wait no longer.

        A newcomer without a number says nothing after its hello: if its connection can be read, it
        has gone.
        """
        waiting, self._waiting = self._waiting, []
        silent = {n.channel.fileno(): n.channel for n in waiting if n.hello.number is None}
        poll = select.poll()
        for fd in silent:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0) if silent else ():
            silent[fd].close()
        return [newcomer for newcomer in waiting if newcomer.channel.fileno() >= 0]

    def fill(self, member: Member, process: int | None) -> None:
        """Note that a member is connected. ``process``: see ``Hello``."""
        if process is not None:
            self._by_process[process] = member.number
        self._last[member.slot] = max(member.number, self._last.get(member.slot, -1))

    def last_in(self, slot: int) -> int | None:
        """Return the member that has come last to fill ``slot``."""
        return self._last.get(slot)

    def number_of(self, process: int) -> int | None:
        """Return the member that its launcher calls ``process``; None: it has not come."""
        return self._by_process.get(process)

    def follow(self, member: Member) -> bool:
        """Return whether another process has come after this member to fill its slot."""
        number, slot = member.number, member.slot
        return self._last.get(slot, -1) > number or any(
            newcomer.hello.slot == slot and number in newcomer.known for newcomer in self._waiting
        )

    def record_of(self, member: Member) -> Record | None:
        """Return the member's last record, if the process that follows it has found it."""
        left = self._left.get(member.slot)
        return left.record if left is not None and left.number == member.number else None

"""An elastic job whose ranks are threads, of which some are lost at a point that a test has chosen.

``kolovod.core.transaction`` keeps what a process has in one place: here each thread has its own. A
rank that dies leaves its engine as a killed process does, and its thread ends. Who is left knows
who that is, and meets in a loopback world of those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Protocol, cast

from kolovod.config import load
from kolovod.core.transaction import use_transaction
from kolovod.core.world import World
from kolovod.elastic.steps import Steps
from kolovod.errors import CollectiveAbortedError
from kolovod.testing.loopback import Loopback, loopback


class Died(BaseException):
    """The rank has been killed."""


class _PerThread:
    """The ``Steps`` of the rank that this thread is."""

    _own = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.steps, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own.steps, name, value)


class Job:
    """``run`` has each rank work in a thread, in a world that the lost ones are not in."""

    def __init__(self, hosts: Sequence[int], frontend: Callable[[], Any]) -> None:
        """``hosts``: of each member a number, as in ``loopback``."""
        self.hosts, self.frontend = tuple(hosts), frontend
        self._worlds: dict[tuple[int, ...], Loopback[Any]] = {}
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def run(self, work: Callable[[Life], Any], deaths: Sequence[Sequence[int]]) -> list[Any]:
        """What ``work`` returns on each member, None where it died; ``deaths``: who, in order."""
        everyone = tuple(range(len(self.hosts)))

        def on_rank(kv: Any) -> Any:
            life = Life(self, kv.world().rank, deaths)
            _PerThread._own.steps = Steps(life, life.world)
            try:
                return work(life)
            except Died:
                return None

        use_transaction(cast(Steps, _PerThread()))
        try:
            with self._stack:
                return self.world_of(everyone).run(on_rank, timeout_s=30.0)
        finally:
            use_transaction(None)

    def world_of(self, members: tuple[int, ...]) -> Loopback[Any]:
        """The same for all who ask for it."""
        with self._lock:
            if members not in self._worlds:
                hosts = [self.hosts[member] for member in members]
                made = loopback(len(members), self.frontend(), hosts=hosts)
                self._worlds[members] = self._stack.enter_context(made)
            return self._worlds[members]


class Mortal(Protocol):
    """A rank that may die."""

    @property
    def member(self) -> int:
        """Its number in the job."""

    @property
    def losses(self) -> int:
        """How often ranks were lost."""

    def die(self) -> None:
        """As by SIGKILL."""


class Life:
    """One member; what finds worlds for it (``steps.Recovery``)."""

    wants_change, leaves, has_failed = False, False, False
    has_state = True

    def __init__(self, job: Job, member: int, deaths: Sequence[Sequence[int]]) -> None:
        """``deaths``: who dies, one loss after the other."""
        self.job, self.member = job, member
        self._deaths = list(deaths)
        self.losses = 0
        self._enter(tuple(range(len(job.hosts))), 0)

    def _enter(self, members: tuple[int, ...], epoch: int) -> None:
        rank, settings = members.index(self.member), load({})
        hosts = tuple(f"host{self.job.hosts[member]}" for member in members)
        engine = self.job.world_of(members).ranks[rank].engine
        facts = rank, len(members), 0, 1, 0, 1, hosts[rank], epoch, engine, settings
        told = cast(Any, SimpleNamespace(coordinator="", rendezvous=""))
        self._now = World(*facts, told, cast(Any, None), members, hosts=hosts)

    def world(self) -> World:
        """That of now."""
        return self._now

    def die(self) -> None:
        """As by SIGKILL."""
        self.job.world_of(self._now.members).kill(self._now.rank)
        raise Died

    def reform(self, error: CollectiveAbortedError) -> None:
        """See ``steps.Recovery``."""
        if not self._deaths:
            raise AssertionError(f"nobody else should be lost: {error}") from error
        lost, members = self._deaths.pop(0), self._now.members
        self.losses += 1
        if self.member in lost:  # another one that dies in the same step was first
            self.die()
        self._now.engine.shutdown()
        self._enter(tuple(m for m in members if m not in lost), self._now.epoch + 1)


def own_steps() -> Steps:
    """Those of the rank that this thread is."""
    return cast(Steps, _PerThread._own.steps)


def miss(own: Steps) -> None:
    """Be a rank that has not heard of a ticket that it has passed."""
    own.passed -= 1
    raise CollectiveAbortedError("as if this rank had missed it")


def at_call(number: int, function: Callable[[], Any], then: Callable[[], None]) -> Any:
    """``function``, after whose call of that number, from 0, ``then`` is called as well."""
    left = [number]

    def called() -> Any:
        result = function()
        left[0] -= 1
        if left[0] == -1:
            then()
        return result

    return called


def arrange(
    place: str,
    number: int,
    life: Mortal,
    victims: Sequence[int],
    members: Sequence[int],
    own: Steps | None = None,
) -> None:
    """From now on: the victims die at a ticket, that of ``number`` from 0; see ``TICKETS``.

    ``own``: the rank's steps, where it is no thread.
    """
    own = own_steps() if own is None else own
    passes = own._pass
    is_victim = life.member in victims
    if is_victim and place == "results":
        before = at_call(number, lambda: None, life.die)

        def first() -> None:
            before()
            passes()

        own._pass = first  # type: ignore[method-assign]
    elif is_victim:
        own._pass = at_call(number, passes, life.die)  # type: ignore[method-assign]
    elif place == "torn" and life.member == max(m for m in members if m not in victims):
        before_loss = life.losses

        def miss_it() -> None:
            if life.losses == before_loss:  # else it has missed the ticket by itself
                miss(own)

        own._pass = at_call(number, passes, miss_it)  # type: ignore[method-assign]


TICKETS = ("results", "ticket", "torn")
"""A rank dies when it has all results, but has not passed the ticket; when it has; when it has, and
one of the others has not."""

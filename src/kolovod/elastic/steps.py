"""A step's results are used by all ranks or by none, whoever dies meanwhile: the ticket.

An allreduce completes on each rank by itself, so where a rank dies in the middle some ranks may
have its result and others an error. Hence, when a rank has all results of a step, and before it
uses one of them, it takes part in one more allreduce, of four bytes: the step's **ticket**. Who has
passed the ticket knows that every rank has all results. So after a failure the survivors compare
which ticket they have passed last: if one of them has passed that of a step, all that miss it have
the step's results, too, and use them; if nobody has, nobody has used a result, and the step's
reductions are repeated among the survivors, from gradients that the first try has left alone.

A survivor that has passed the ticket may be in the next step when it hears of the failure, and one
that has not is in the same step still. What both decide after a step, who takes which samples, say,
must therefore follow from the ticket and from the world in which it was passed (``Steps.world``),
not from the world of the moment.

The argument is that of a commit in two phases (Gray, "Notes on data base operating systems", 1978)
in which whoever is left takes the coordinator's part: no rank is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.ops import Max
from kolovod.core.world import World
from kolovod.errors import CollectiveAbortedError, CollectiveError, JobOverError, MismatchError

__all__ = ["Recovery", "Steps", "enter", "exactly", "ongoing", "settle", "settle_by"]

T = TypeVar("T")

# A ticket: is another world wanted, the step's number modulo 256, and 255 less that. The largest of
# all ranks' are those of each rank if all are at the same step.
_BYTES = 4
_CHANGE, _STEP, _STEP_INVERTED = 1, 2, 3


class Recovery(Protocol):
    """What finds worlds for a process of an elastic job."""

    def reform(self, error: CollectiveAbortedError) -> None:
        """Return when this process is in a world that follows the one that has failed.

        Raises an error when there can be none; CollectiveAbortedError only if that one has failed,
        too.
        """
        ...

    @property
    def wants_change(self) -> bool:
        """Whether another world waits until all ranks stop."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether this process has what all ranks have alike."""
        ...


class Steps:
    """The steps of one process in an elastic job."""

    def __init__(self, recovery: Recovery, world: Callable[[], World]) -> None:
        """``world``: that of now, among whose ranks tickets are passed."""
        self.passed = 0
        """Tickets, the same on all ranks that have the state."""
        self.must_stop = False
        """Whether a rank has wished for another world in the last ticket."""
        self.lacks_state = False
        """Whether a rank of this world has come without the state."""
        self.counted: tuple[int, ...] | None = None
        """Whose gradients are in the last step that counts samples, until ``commit``."""
        self.over: JobOverError | None = None
        """What a step has found: the job ends, or goes on without this process."""
        self._lock = threading.RLock()  # programs of a framework step in threads of theirs
        self._recovery = recovery
        self._world = world
        self._passed_in: World | None = None
        self._verbs = Collectives(NumpyFrontend(), world)

    @property
    def world(self) -> World:
        """The same for all ranks after a step: that in which its ticket was passed."""
        now = self._world()  # alone, a step may have no ticket, and nobody decides otherwise
        return now if now.size == 1 or self._passed_in is None else self._passed_in

    def begin(self) -> None:
        """All ranks come into this world alike."""
        try:
            self.meet()
        except CollectiveAbortedError as error:
            self.recover(error)

    def exactly(self, attempt: Callable[[], T], *, counts: bool = False) -> T:
        """What ``attempt()`` returns, once every rank has such a result; tried until then.

        ``attempt``: runs collective operations, and changes nothing that it reads: it is called
        again, in a smaller world, when a rank is lost. ``counts``: it combines gradients, so the
        samples of those whose gradients are in the result have been used. Raises what
        ``Recovery.reform`` raises, and what ``attempt`` does but CollectiveAbortedError.
        """
        with self._lock:
            return self._exactly(attempt, counts)

    def _exactly(self, attempt: Callable[[], T], counts: bool) -> T:
        while True:
            results: list[T] = []
            world = self._world()
            try:
                results.append(attempt())
                self._pass()
                return self._done(results[0], world, counts)
            except CollectiveAbortedError as error:
                before = self.passed
                self.recover(error)
            if self.passed > before:  # somebody has passed this step's ticket, so all may
                if not results:
                    raise CollectiveError(
                        f"another rank has completed step {self.passed}, of which this one has no "
                        "results: do all ranks run the same operations?"
                    )
                return self._done(results[0], world, counts)

    def _done(self, result: T, world: World, counts: bool) -> T:
        """The ticket was passed in ``world``, on this rank or another."""
        self._passed_in = world
        if counts:
            self.counted = world.members
        return result

    def recover(self, error: CollectiveAbortedError) -> None:
        """Get into the next world, and learn what its ranks have done and have."""
        while True:
            try:
                self._recovery.reform(error)
            except JobOverError as over:
                self.over = over
                raise
            try:
                self.meet()
                return
            except CollectiveAbortedError as again:
                error = again

    def meet(self) -> None:
        """The first operation in every world: which ticket was passed last, and who lacks what."""
        last = 2 * self.passed + self.must_stop  # what a ticket says, all say who have passed it
        mine = np.array([last, not self._recovery.has_state], np.int64)
        self._verbs.allreduce_(mine, "elastic.meeting", Max)
        self.passed, self.must_stop = int(mine[0]) // 2, bool(mine[0] % 2)
        self.lacks_state = bool(mine[1])

    def _pass(self) -> None:
        ticket = np.zeros(_BYTES, np.uint8)
        number = self.passed % 256
        ticket[_CHANGE] = self._recovery.wants_change
        ticket[_STEP], ticket[_STEP_INVERTED] = number, 255 - number
        self._verbs.allreduce_(ticket, "elastic.ticket", Max)
        if ticket[_STEP] != number or ticket[_STEP_INVERTED] != 255 - number:
            raise MismatchError(
                f"this rank has completed {self.passed} steps, others not as many: all ranks of an "
                "elastic job step, and call elastic.exactly, alike"
            )
        self.passed += 1
        self.must_stop = bool(ticket[_CHANGE])


_ongoing: Steps | None = None
_settling: list[Callable[[], object]] = []


def enter(steps: Steps | None) -> None:
    """``steps`` are those of this process from now on; None: its job is not elastic."""
    global _ongoing
    _ongoing = steps


def ongoing() -> Steps | None:
    """Those of this process; None where the job is not elastic."""
    return _ongoing


def exactly(attempt: Callable[[], T], *, counts: bool = False) -> T:
    """What ``attempt()`` returns; in an elastic job tried until all ranks have such a result.

    ``attempt``: runs collective operations, and changes nothing that it reads: it is called again
    when a rank is lost. ``counts``: it combines gradients, as the step of a DistributedOptimizer
    does by itself: by it samples count as used (ElasticSampler). Raises what ``attempt`` does, but
    where the job goes on no CollectiveAbortedError; JobOverError.
    """
    if _ongoing is None:
        return attempt()
    settle()
    return _ongoing.exactly(attempt, counts=counts)


def settle_by(wait: Callable[[], object]) -> None:
    """Have ``wait()`` called before this process steps, or commits, outside of programs.

    It returns when the steps of all programs that were started before are over.
    """
    _settling.append(wait)


def settle() -> None:
    """Wait until the steps of all programs that were started before are over."""
    for wait in _settling:
        wait()

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

A step that has overwritten what it reads (gradients that are reduced in place, ``recomputes``), or
an operation outside of any step, cannot be repeated. Where it is interrupted the ranks go back to
the last commit, which was after the same ticket for all that have come to it: the meeting tells who
goes back, and to which (``StepInterruptedError``).

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
from kolovod.core.submission import WorldLike
from kolovod.core.transaction import Transaction, forget, settle, transaction
from kolovod.core.world import World
from kolovod.errors import CollectiveAbortedError, CollectiveError, JobOverError, MismatchError

__all__ = ["HandOver", "Recovery", "StepInterruptedError", "Steps", "exactly"]

T = TypeVar("T")

# A ticket: does a rank stay in the job, is another world wanted, the step's number modulo 256, and
# 255 less that. The largest of all ranks' are those of each rank if all are at the same step.
_BYTES = 4
_STAYS, _CHANGE, _STEP, _STEP_INVERTED = range(_BYTES)


class StepInterruptedError(CollectiveAbortedError):
    """A step has to be computed again from the last commit. ``elastic.run`` sees to it."""


class Recovery(Protocol):
    """A finder of worlds for a process of an elastic job."""

    def reform(self, error: CollectiveAbortedError) -> None:
        """Return when this process is in a world that follows the one that has failed.

        Raises an error when there can be none; CollectiveAbortedError only if that one has failed,
        too.
        """
        ...

    @property
    def wants_change(self) -> bool:
        """True if another world waits until all ranks stop."""
        ...

    @property
    def leaves(self) -> bool:
        """True if this process has been told to leave."""
        ...

    @property
    def has_state(self) -> bool:
        """True if this process has what all ranks have alike."""
        ...

    @property
    def has_failed(self) -> bool:
        """True if the present world has failed, and it is known what follows."""
        ...


class HandOver(Protocol):
    """The state, on its way to ranks that have joined, while all compute the next step."""

    def deliver(self) -> None:
        """Return when this rank has sent and received its part, in the world of now.

        Raises CollectiveAbortedError where that world has failed, and may be called again.
        """
        ...

    def over(self) -> None:
        """Note that all ranks have the state."""
        ...


class Steps(Transaction):
    """The steps of one process in an elastic job."""

    is_elastic = True

    def __init__(
        self,
        recovery: Recovery,
        world: Callable[[], World],
        *,
        recomputes: bool = False,
        entered: Callable[[], object] = lambda: None,
    ) -> None:
        """``world``: that of now, among whose ranks tickets are passed.

        ``recomputes``: what is interrupted may be computed again from the last commit.
        ``entered()`` is called by all ranks when they have met in a world, and may run operations.
        """
        self.recomputes = recomputes
        self.passed = 0
        """Tickets, the same on all ranks that have the state."""
        self.must_stop = False
        """Whether a rank has wished for another world in the last ticket."""
        self.lacking = frozenset()
        self.weightless: frozenset[int] = frozenset()
        """Members whose gradients do not count until ``commit``: they had no state before."""
        self.counted: tuple[int, ...] | None = None
        """Whose gradients are in the last step that counts samples, until ``commit``."""
        self.all_counted: list[tuple[int, ...]] = []
        """The same of each such step since the last ``commit``."""
        self._committed = 0  # tickets that were passed at the last commit
        self._is_applied = False  # since then a step that counts samples
        self._goes_back = False  # what this rank was at cannot be repeated
        self._target: int | None = None  # tickets at the commit to which ranks go back
        self._hand_over: HandOver | None = None
        self.over: JobOverError | None = None
        """What a step has found: the job ends, or goes on without this process."""
        self._lock = threading.RLock()  # programs of a framework step in threads of theirs
        self._recovery = recovery
        self._world = world
        self._entered = entered
        self._passed_in: World | None = None
        self._verbs = Collectives(NumpyFrontend(), world)

    @property
    def world(self) -> World:
        """The world in which the last ticket was passed: after a step the same for all ranks."""
        now = self._world()  # alone, a step may have no ticket, and nobody decides otherwise
        return now if now.size == 1 or self._passed_in is None else self._passed_in

    @property
    def present_world(self) -> World:
        """The world of now."""
        return self._world()

    @property
    def lacks_state(self) -> bool:
        """True if a rank of this world has come without the state."""
        return bool(self.lacking)

    @property
    def first_lacks_state(self) -> bool:
        """True if rank 0 has come without the state, which the others would be given by it."""
        return 0 in self.lacking

    @property
    def committed(self) -> int:
        """The number of tickets that were passed at the last commit."""
        return self._committed

    def begin(self) -> None:
        """All ranks come into this world alike."""
        try:
            self.meet()
            self._entered()
        except CollectiveAbortedError as error:
            self.recover(error)

    def commit(self) -> None:
        """All ranks are here, with the same state: here they come back to."""
        self._committed, self._is_applied = self.passed, False
        self.weightless = frozenset()

    def hand_over(self, state: HandOver) -> None:
        """Let the next step that combines gradients bring ``state`` to the ranks that lack it.

        All ranks call it after ``commit``. Until the next one those ranks' gradients do not count.
        """
        members = self._world().members
        self.weightless = frozenset(members[rank] for rank in self.lacking)
        self._hand_over = state

    def finish_hand_over(self) -> None:
        """Bring the state to those that lack it, where no step has."""
        if self._hand_over is not None:
            with self._lock:
                self._exactly(lambda: None, counts=False, is_repeatable=True, delivers=True)

    def counting(self, world: WorldLike) -> tuple[bool, int]:
        """Return whether this rank's gradients count, and over how many ranks a mean is taken.

        Where some do not count, both are meant in the present world.
        """
        if not self.weightless:
            return True, world.size
        now = self._world()
        here = self.weightless.intersection(now.members)
        return now.members[now.rank] not in here, now.size - len(here)

    @property
    def keeps_gradients(self) -> bool:
        """True if a step is repeated from its gradients, which must stay as they are."""
        return not self.recomputes

    def go_back(self, error: CollectiveAbortedError) -> None:
        """Get into the next world, where all ranks begin again from the last commit.

        ``error``: what the training function has raised. Raises CollectiveError if the step's
        results have been used already.
        """
        if not isinstance(error, StepInterruptedError):
            if self._is_applied:
                raise CollectiveError(
                    "an operation between the step's update and commit() was interrupted, so the "
                    "step can be neither finished nor computed again: run such operations by "
                    "elastic.exactly, or before the update"
                ) from error
            self._goes_back = True
            self.recover(error)
        self._goes_back = False
        forget()

    def run(
        self, attempt: Callable[[], T], *, counts: bool = False, is_repeatable: bool = True
    ) -> T:
        """Return what ``attempt()`` returns, once every rank has such a result.

        It is tried until then, after the steps of programs that were started before. ``attempt``:
        runs collective operations, and changes nothing that it reads: it is called again, in a
        smaller world, when a rank is lost. ``counts``: it combines gradients, so the samples of
        those whose gradients are in the result have been used. ``is_repeatable``: False says that
        it does change what it reads. Raises what ``Recovery.reform`` raises, what ``attempt``
        raises except CollectiveAbortedError, and StepInterruptedError where all ranks go back to
        the last commit.
        """
        settle()
        with self._lock:
            return self._exactly(attempt, counts, is_repeatable, delivers=counts)

    def run_in_program(self, attempt: Callable[[], T], *, counts: bool = False) -> T:
        """Do what ``run`` does, within a program, which does not wait for itself."""
        with self._lock:
            return self._exactly(attempt, counts, is_repeatable=True, delivers=counts)

    def _exactly(
        self, attempt: Callable[[], T], counts: bool, is_repeatable: bool, delivers: bool
    ) -> T:
        """``delivers``: the state is brought to those that lack it, too."""
        while True:
            results: list[T] = []
            world = self._world()
            try:
                if delivers and self._hand_over is not None:
                    self._hand_over.deliver()
                results.append(attempt())
                self._pass()
                return self._done(results[0], world, counts, delivers)
            except CollectiveAbortedError as error:
                before = self.passed
                self._goes_back = not is_repeatable
                self.recover(error)
                if self._target == self._committed:
                    raise StepInterruptedError(str(error)) from error
                self._goes_back = False
            if self.passed > before:  # somebody has passed this step's ticket, so all may
                if not results:
                    raise CollectiveError(
                        f"another rank has completed step {self.passed}, of which this one has no "
                        "results: do all ranks run the same operations?"
                    )
                return self._done(results[0], world, counts, delivers)

    def _done(self, result: T, world: World, counts: bool, delivers: bool) -> T:
        """Note that the ticket was passed in ``world``, on this rank or another."""
        self._passed_in = world
        if delivers and self._hand_over is not None:
            state, self._hand_over = self._hand_over, None
            state.over()
        if counts:
            self.counted, self._is_applied = world.members, True
            self.all_counted.append(world.members)
        return result

    def follow(self) -> None:
        """Get into the next world if the present one has failed, in which nothing is going on.

        For who runs no operation for long, and so does not notice: the others may wait there. This
        rank's part is missing in whatever they have not passed, so it has missed nothing. Raises
        what ``Recovery.reform`` raises.
        """
        if self._recovery.has_failed:
            with self._lock:
                self.recover(CollectiveAbortedError("another world follows the present one"))

    def recover(self, error: CollectiveAbortedError) -> None:
        """Get into the next world, and learn what its ranks have done and have."""
        try:
            while True:
                try:
                    self._recovery.reform(error)
                except JobOverError as over:
                    self.over = over
                    raise
                try:
                    self.meet()
                    self._entered()
                    return
                except CollectiveAbortedError as again:
                    error = again
        finally:
            del error  # it has this frame: a circle, which would keep the failed world's memory

    def meet(self) -> None:
        """The first operation in every world: which ticket was passed last, and who lacks what."""
        # What a ticket says, all say who have passed it; of them, does one have to go back?
        last = 4 * self.passed + 2 * self.must_stop + self._goes_back
        target = self._committed if self._goes_back else -1
        world = self._world()
        mine = np.zeros(2 + world.size, np.int64)
        mine[:2] = last, target
        mine[2 + world.rank] = not self._recovery.has_state
        self._verbs.allreduce_(mine, "elastic.meeting", Max)
        self.passed, self.must_stop = int(mine[0]) // 4, bool(mine[0] & 2)
        self.lacking = frozenset(np.flatnonzero(mine[2:]).tolist())
        self._target = int(mine[1]) if mine[0] & 1 else None

    def _pass(self) -> None:
        ticket = np.zeros(_BYTES, np.uint8)
        number = self.passed % 256
        ticket[_STAYS] = not self._recovery.leaves
        ticket[_CHANGE] = self._recovery.wants_change
        ticket[_STEP], ticket[_STEP_INVERTED] = number, 255 - number
        self._verbs.allreduce_(ticket, "elastic.ticket", Max)
        if ticket[_STEP] != number or ticket[_STEP_INVERTED] != 255 - number:
            raise MismatchError(
                f"this rank has completed {self.passed} steps, others not as many: all ranks of an "
                "elastic job step, and call elastic.exactly, alike"
            )
        self.passed += 1
        self.must_stop = bool(ticket[_CHANGE]) or not ticket[_STAYS]


def exactly(attempt: Callable[[], T], *, counts: bool = False, is_repeatable: bool = True) -> T:
    """Return what ``attempt()`` returns; in an elastic job once all ranks have such a result.

    It is tried until then. ``attempt``: runs collective operations, and changes nothing that it
    reads: it is called again when a rank is lost. ``counts``: it combines gradients, as the step of
    a DistributedOptimizer does by itself: by it samples count as used (ElasticSampler).
    ``is_repeatable``: False says that it does change what it reads;
    ``elastic.run(redo="recompute")`` is needed for that. Raises what ``attempt`` does, but where
    the job goes on no CollectiveAbortedError; JobOverError.
    """
    return transaction().run(attempt, counts=counts, is_repeatable=is_repeatable)

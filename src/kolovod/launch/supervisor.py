"""The loop in which a launcher sees a job through: it waits, hears signals, and ends processes.

What becomes of the others when a rank has failed is a policy's matter: ``Job`` ends them all,
``ElasticJob`` starts another process in its place.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from enum import IntEnum, auto

from kolovod.launch.fleet import Fleet
from kolovod.launch.heard_signals import HeardSignals, Meaning
from kolovod.launch.local import GRACE_S, signal_name
from kolovod.launch.output import Output
from kolovod.launch.status_facts import StatusFacts
from kolovod.launch.step_rate import StepRateProbe

__all__ = ["Phase", "Policy", "Supervisor"]

_KILL_AGAIN_S = 1.0
_POLL_WITHOUT_PIDFD_S = 0.05


class Phase(IntEnum):
    """The state that a job is in. It goes forward only, and may leave some out."""

    STARTING = auto()
    RUNNING = auto()
    NAMING = auto()
    """A rank has failed that blames one which still runs: that one's end tells more."""
    LAST_WORDS = auto()
    """The job is about to end: ranks may say what they have met, or write a checkpoint."""
    STOPPING = auto()
    """Its processes were told to end, and have a grace."""
    KILLING = auto()
    """The grace is over, and they are killed, each second again."""
    CLOSED = auto()
    """Nothing is left of it."""


class Policy(abc.ABC):
    """The decisions of a job, for which the loop of its supervisor asks."""

    @abc.abstractmethod
    def world_size(self) -> int:
        """Return how many ranks its world has."""

    @abc.abstractmethod
    def look(self) -> Sequence[float | None]:
        """Collect the processes that have ended, and act upon all that has happened.

        NAMING and LAST_WORDS end here, when they are due. Returns moments at which to look again.
        """

    def may_hear_of_more(self) -> bool:
        """Return whether processes may turn up though none is known to run."""
        return False

    def let_leave(self, signum: int) -> float:
        """Prepare for a signal of the user's; return how long ranks then have until they end."""
        return GRACE_S

    def to_end(self) -> set[int] | None:
        """Return the processes that are to end with the job; None: all that there are."""
        return None


class Supervisor:
    """Runs a job by its policy; signals, phases and the killing of what is late are here."""

    def __init__(
        self, policy: Policy, fleet: Fleet, output: Output, note: Callable[[str], None]
    ) -> None:
        """``fleet`` and ``output`` are closed with it; ``note(text)`` tells the user."""
        self.fleet = fleet
        self._policy = policy
        self._output = output
        self._note = note
        self._signals = HeardSignals()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._started_s = time.monotonic()
        self._step_rate = StepRateProbe(fleet.pids_here)
        self._due_s = math.inf  # the phase ends
        self._grace_s = GRACE_S
        self._why = ""  # it is stopped
        self._ending: dict[int, tuple[float, str]] = {}  # when to kill processes, and why
        self.phase = Phase.STARTING
        self.lasting = contextlib.ExitStack()
        """What processes need until they have ended: it is closed after them."""
        self.stopped_by: int | None = None
        """The signal by which the user has ended the job."""
        self.may_run_on = False
        """After ``close``: nobody could find out whether all of its processes have ended."""

    def signal(self, signum: int, way: str = "") -> None:
        """From a signal handler, too: end the job, at once if it comes again (``HeardSignals``)."""
        self._signals.add(signum, way)
        self.ring()

    def ring(self) -> None:
        """On any thread: have the loop look at what has happened."""
        with contextlib.suppress(OSError, ValueError):  # it is closed
            os.eventfd_write(self._bell, 1)

    def is_told_to_end(self) -> bool:
        """Return whether a signal waits that ends the job."""
        return bool(self._signals)

    @property
    def is_stopping(self) -> bool:
        """True once the processes were told to end."""
        return self.phase >= Phase.STOPPING

    def status(self) -> StatusFacts | str:
        """Return how the job gets on, "" at first. Only one thread may call it, whichever."""
        if self.phase is Phase.STARTING:
            return ""
        elapsed_s, up = time.monotonic() - self._started_s, len(self.fleet.running)
        return StatusFacts(elapsed_s, up, self._policy.world_size(), self._step_rate.now())

    def run(self) -> None:
        """Return when all processes have ended."""
        while self.goes_on():
            moments = self._policy.look()
            self.obey_signals()
            self._kill_late()
            if self.goes_on():
                self._sleep(moments)

    def goes_on(self) -> bool:
        """Return whether processes run, or may turn up."""
        return bool(self.fleet.running) or self._policy.may_hear_of_more()

    def advance(self, phase: Phase, limit_s: float = math.inf) -> None:
        """Enter ``phase``, which ends after ``limit_s``. Nothing happens if it was entered."""
        if phase > self.phase:
            self.phase, self._due_s = phase, time.monotonic() + limit_s

    def is_due(self, phase: Phase) -> bool:
        """Return whether the job is in ``phase``, and that has had its time."""
        return self.phase is phase and time.monotonic() >= self._due_s

    def stop(self, signum: int, why: str, grace_s: float | None = None) -> None:
        """End all that is to end with the job: ``signum``, and SIGKILL after a grace."""
        self._why = why
        self.fleet.send(signum, why, self._policy.to_end())
        if not self.is_stopping:
            self._grace_s = GRACE_S if grace_s is None else grace_s
            self.advance(Phase.STOPPING, self._grace_s)

    def end(self, numbers: Collection[int], why: str) -> None:
        """End processes while the job goes on: SIGTERM, and SIGKILL after a grace."""
        self.fleet.send(signal.SIGTERM, why, numbers)
        self._ending |= dict.fromkeys(numbers, (time.monotonic() + GRACE_S, why))

    def is_ending(self, number: int) -> bool:
        """Return whether ``end`` was called for this process."""
        return number in self._ending

    def obey_signals(self) -> None:
        """Do what the signals ask for that have come."""
        while (heard := self._signals.take()) is not None:
            signum, meaning = heard
            name, count = signal_name(signum), len(self.fleet.running)
            if meaning is Meaning.PASS_ON:
                self._policy.let_leave(signum)
                self.fleet.send(signum, "")
            elif meaning is Meaning.END:
                self.stopped_by = signum
                self._note(f"{name}: ending {count} ranks (again: kill them)")
                self.stop(signum, "", self._policy.let_leave(signum))
            else:
                self._note(f"{name} again: killing {count} ranks")
                self.stop(signal.SIGKILL, f"{name} came again")

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        try:
            self._close()
        except KeyboardInterrupt:  # again; the program may go on, and nothing of the job is left
            self._close()
            raise

    def _kill_late(self) -> None:
        """Kill what has had its grace, again each second: a host may not have heard it."""
        now = time.monotonic()
        for number in self.fleet.running & self._ending.keys():
            kill_at_s, why = self._ending[number]
            if now >= kill_at_s:
                self._ending[number] = now + _KILL_AGAIN_S, why
                self.fleet.send(signal.SIGKILL, why, {number})
        if self.is_stopping and now >= self._due_s:
            self.phase, self._due_s = Phase.KILLING, now + _KILL_AGAIN_S
            why = f"it did not end within {self._grace_s:g} s"
            why += f" ({self._why})" if self._why else ""
            self.fleet.send(signal.SIGKILL, why, self._policy.to_end())

    def _sleep(self, moments: Sequence[float | None]) -> None:
        """Wait until something may have happened."""
        poll = select.poll()
        for fd in (self._bell, *self.fleet.fds()):
            poll.register(fd, select.POLLIN)
        kill_times = [self._ending[n][0] for n in self.fleet.running & self._ending.keys()]
        until_s = min(self._due_s, *kill_times, *(m for m in moments if m is not None), math.inf)
        sleep_s = max(0.0, until_s - time.monotonic())
        if self.fleet.needs_polling():
            sleep_s = min(sleep_s, _POLL_WITHOUT_PIDFD_S)
        poll.poll(None if sleep_s == math.inf else sleep_s * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _close(self) -> None:
        if self.phase is Phase.CLOSED:
            return
        self._step_rate.close()
        self.fleet.close()
        self.may_run_on = self.fleet.may_run_on
        self._output.close()
        self.lasting.close()
        bell, self._bell = self._bell, -1  # before its number may be another file's
        os.close(bell)
        self.phase = Phase.CLOSED

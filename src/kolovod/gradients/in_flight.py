"""Buckets on their way: submitted, waited for, let go.

What a bucket's operation reads and writes (its ``buffers``) is kept alive until the engine is done
with it, whatever becomes of the optimizer meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.core.handles import Handle, held_buffers
from kolovod.errors import from_engine
from kolovod.gradients.stager import Queued

_FOREVER = -1.0


class Flight(NamedTuple):
    """One operation that is on its way."""

    buffers: Any
    """An object of the front end's that goes with the operation."""
    wait: Callable[[], object]
    """Returns when it is complete. Raises the engine's errors, and a device's."""
    let_go: Callable[[], object]
    """Nobody waits for it (any more); its buffers live on as long as they are in use."""
    is_staged: bool = False
    """A thread submits it when its data are there."""


def submitted(engine: _native.Engine, number: int, buffers: Any) -> Flight:
    """An operation that the engine has, by its number there; ``buffers`` holds its buffers."""
    wait = partial(engine.wait, number, _FOREVER)
    return Flight(buffers, wait, partial(held_buffers.keep, engine, number, buffers))


def staged(queued: Queued, buffers: Any) -> Flight:
    """An operation that a thread submits when its data have come from a device."""
    return Flight(
        buffers, lambda: queued.engine.wait(queued.number(), _FOREVER), queued.let_go, True
    )


def handled(handle: Handle[Any], take: Callable[[Any], None], buffers: Any) -> Flight:
    """An operation of a verb; ``take(results)`` gets what it comes to. It lets go by itself."""
    return Flight(buffers, lambda: take(handle.wait()), int)


class InFlight:
    """The operations of one optimizer that are on their way, in the order of their submission."""

    def __init__(self, over: Callable[[Any], None]) -> None:
        """``over(buffers)``: is called for each when it is not on its way any more."""
        self.flights: list[Flight] = []
        self._over = over

    def __len__(self) -> int:
        """Return the number of operations on their way."""
        return len(self.flights)

    def add(self, flight: Flight) -> None:
        """Add one that is on its way."""
        self.flights.append(flight)

    def wait_for_all(self, landed: Callable[[Any], None]) -> None:
        """Wait for all, and call ``landed(buffers)`` for each as soon as it is complete.

        The last submitted first: one wait drives the engine through all of them; of staged ones the
        first, so that results go back while others are combined. When some fail, all are waited
        for, then the first failure is raised.
        """
        failure: Exception | None = None
        while self.flights:
            at = 0 if self.flights[0].is_staged else -1
            flight = self.flights[at]
            try:
                flight.wait()
                landed(flight.buffers)
            except Exception as error:  # the engine's, or the device's
                failure = failure or error
            self.flights.pop(at)
            self._let_go(flight)
        if isinstance(failure, _native.EngineError):
            raise from_engine(failure)
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Let go of all, and wait for none: their world is gone."""
        while self.flights:
            self._let_go(self.flights.pop())

    def _let_go(self, flight: Flight) -> None:
        flight.let_go()
        self._over(flight.buffers)

    def __del__(self) -> None:
        """Let go of what is on its way: it outlives this object."""
        for flight in self.flights:
            flight.let_go()

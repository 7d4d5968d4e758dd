"""Buckets on their way: submitted, waited for, let go.

What a bucket's operation reads and writes (its ``cargo``) is kept alive until the engine is done
with it, whatever becomes of the optimizer meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kolovod import _native
from kolovod.core.handles import Handle, keeper
from kolovod.errors import from_engine
from kolovod.gradients.stager import Queued

_FOREVER = -1.0


class Flight(Protocol):
    """One operation that is on its way."""

    cargo: Any
    """What the front end knows of it."""
    is_staged: bool
    """A thread submits it when its data are there."""

    def wait(self) -> None:
        """Return when it is complete. Raises the engine's errors, and a device's."""
        ...

    def let_go(self) -> None:
        """Nobody waits for it (any more); its buffers live on as long as they are in use."""
        ...


class Submitted:
    """An operation that the engine has, by its number there."""

    __slots__ = ("cargo", "engine", "number")
    is_staged = False

    def __init__(self, engine: _native.Engine, number: int, cargo: Any) -> None:
        """``cargo`` holds the buffers."""
        self.engine, self.number, self.cargo = engine, number, cargo

    def wait(self) -> None:
        """See Flight."""
        self.engine.wait(self.number, _FOREVER)

    def let_go(self) -> None:
        """See Flight."""
        keeper.keep(self.engine, self.number, self.cargo)


class Staged:
    """An operation that a thread submits when its data have come from a device."""

    __slots__ = ("cargo", "queued")
    is_staged = True

    def __init__(self, queued: Queued, cargo: Any) -> None:
        """``queued`` holds the buffers."""
        self.queued, self.cargo = queued, cargo

    def wait(self) -> None:
        """See Flight."""
        self.queued.engine.wait(self.queued.number(), _FOREVER)

    def let_go(self) -> None:
        """See Flight."""
        self.queued.let_go()


class Handled:
    """An operation of a verb; ``take(results)`` gets what it comes to."""

    __slots__ = ("_handle", "_take", "cargo")
    is_staged = False

    def __init__(self, handle: Handle[Any], take: Callable[[Any], None], cargo: Any) -> None:
        """``handle`` holds the buffers."""
        self._handle: Handle[Any] | None = handle
        self._take, self.cargo = take, cargo

    def wait(self) -> None:
        """See Flight."""
        assert self._handle is not None
        self._take(self._handle.wait())

    def let_go(self) -> None:
        """See Flight."""
        self._handle = None  # which lets go by itself


class InFlight:
    """The operations of one optimizer that are on their way, in the order of their submission."""

    def __init__(self, over: Callable[[Any], None]) -> None:
        """``over(cargo)``: is called for each when it is not on its way any more."""
        self.flights: list[Flight] = []
        self._over = over

    def __len__(self) -> int:
        """How many there are."""
        return len(self.flights)

    def add(self, flight: Flight) -> None:
        """Take one more."""
        self.flights.append(flight)

    def wait_for_all(self, landed: Callable[[Any], None]) -> None:
        """Wait for all, and call ``landed(cargo)`` for each as soon as it is complete.

        The last submitted first: one wait drives the engine through all of them. Those that were
        staged first submitted first, so that results go back while others are combined. When some
        fail, all are waited for, then the first failure is raised.
        """
        failure: Exception | None = None
        while self.flights:
            at = 0 if self.flights[0].is_staged else -1
            flight = self.flights[at]
            try:
                flight.wait()
                landed(flight.cargo)
            except Exception as error:  # the engine's, or the device's
                failure = failure or error
            self.flights.pop(at)
            self._let_go(flight)
        if isinstance(failure, _native.EngineError):
            raise from_engine(failure)
        if failure is not None:
            raise failure

    def discard(self) -> None:
        """Wait for none of them: their world is gone."""
        while self.flights:
            self._let_go(self.flights.pop())

    def _let_go(self, flight: Flight) -> None:
        flight.let_go()
        self._over(flight.cargo)

    def __del__(self) -> None:
        """What is on its way outlives this object."""
        for flight in self.flights:
            flight.let_go()

"""Horovod's elastic interface without a framework: states, and functions that are entered again.

When a rank is lost, or hosts come and go, all ranks leave the function, form a new world, and enter
the function again, with the state of the last commit or of now. Who decides on worlds is in
``kolovod.elastic``; what makes a process take part in Horovod's way in ``membership``.
"""

from __future__ import annotations

import copy
import functools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from horovod.common import membership
from horovod.common.basics import init, shutdown
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.notifications import HostUpdateResult, notification_manager
from kolovod.errors import InternalError, MismatchError, NotInitializedError

__all__ = ["Kept", "ObjectState", "State", "next_world", "notification_manager", "run_fn"]

R = TypeVar("R")

_FINAL = (MismatchError, NotInitializedError, InternalError)
"""HorovodInternalErrors that another try would meet again. Horovod tries for ever."""


class Kept(ABC):
    """A value that all ranks have alike, and return to when a rank is lost."""

    @abstractmethod
    def save(self) -> None:
        """Keep a copy, for ``restore``."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what ``save`` or ``sync`` has kept last; else to the beginning."""

    @abstractmethod
    def sync(self) -> None:
        """Take what rank 0 has, and keep a copy of it. All ranks call it alike."""


class State(Kept):
    """The state of a training, which hears of hosts that come and go; for subclasses."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """``bcast_object(value)``: rank 0's ``value``, on all ranks. ``get_rank()``: of now."""
        self._bcast_object = bcast_object
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these, in this order, in each new world before the function is entered again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Begin in a new world, of a process that was in the one before."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have changed, on any thread. ``update_res``: a HostUpdateResult."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """``save``, and ``check_host_updates``. All ranks call it alike."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks alike if rank 0 has heard of other hosts.

        It is a broadcast, and much cheaper than ``commit`` where the state is large. What is newer
        than the last commit is not lost by it: rank 0's state of now goes to new ranks.
        """
        before = latest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while True:
            try:
                timestamp, what = self._host_messages.get_nowait()
            except queue.Empty:
                break
            if timestamp > before:
                latest, update = max(latest, timestamp), update | what
        before, latest, update = self._bcast_object((before, latest, update))
        self._last_updated_timestamp = latest
        if latest > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def reset(self) -> None:
        """Do what a new world asks for, before the callbacks are called; for subclasses."""


class ObjectState(State):
    """Attributes of any kind that can be pickled, and what subclasses add to them."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        """``kwargs``: the attributes. Their names are the same on all ranks."""
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = copy.deepcopy(kwargs)
        self._set(kwargs)

    def _parts(self) -> Iterable[Kept]:
        """Return what is kept in a way of its own, before the attributes; for subclasses."""
        return ()

    def save(self) -> None:
        """Implement ``Kept.save``."""
        for part in self._parts():
            part.save()
        self._save_values()

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        for part in self._parts():
            part.restore()
        self._set(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        for part in self._parts():
            part.sync()
        if self._saved_state:
            self._set(self._bcast_object(self._values()))
            self._save_values()

    def _save_values(self) -> None:
        self._saved_state = copy.deepcopy(self._values())

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def next_world() -> None:
    """Leave the present world, and return in the next one."""
    shutdown()
    init()


def run_fn(func: Callable[..., R], reset: Callable[[], object]) -> Callable[..., R]:
    """``func(state, ...)`` that is entered again in each world, until it returns.

    ``reset()``: leaves the present world, and returns in the next one. After HorovodInternalError
    the state is restored first, after HostsUpdatedInterrupt it goes on as it is. Raises what
    ``func`` raises; an error that comes from the script, such as shapes that differ between ranks,
    is not tried again. A process whose host is not wanted any more ends: SystemExit(0).
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            with membership.gives_up():
                return _run(func, reset, state, args, kwargs)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _run(
    func: Callable[..., R],
    reset: Callable[[], object],
    state: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> R:
    is_new = skips_sync = False
    while True:
        if is_new:
            reset()
            membership.enough(reset)
        try:
            if is_new:
                state.on_reset()
                notification_manager.look()  # of what has come while old messages were thrown away
            if membership.must_sync(not skips_sync):
                state.sync()
            membership.synced()
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            if isinstance(error, _FINAL):
                raise
            membership.failed(error)
            state.restore()
            skips_sync = False
        except HostsUpdatedInterrupt as interrupt:
            membership.stops()
            skips_sync = bool(interrupt.skip_sync)
        is_new = True

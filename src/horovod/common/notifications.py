"""Notices by which a state hears that the hosts of its job have changed."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from horovod.common import membership
from kolovod.coordination.consensus import World

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager"]


class HostUpdateResult:
    """The kinds of changes of the hosts; values can be combined by ``|``."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """An object that hears of changes of the hosts: a state."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note a change of the hosts; see ``State``."""
        ...


class WorkerNotificationManager:
    """Tells all listeners of this process of each world that waits for its ranks to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._last = 0.0

    def init(self) -> None:
        """Hear of changes from now on; nothing if the job is not elastic. Idempotent."""
        client = membership.client()
        if client is not None:
            client.hears_of_change = self.look

    def register_listener(self, listener: Listener) -> None:
        """Tell ``listener``, too, also of what waits already."""
        with self._lock:
            self._listeners.append(listener)
        self.look()

    def remove_listener(self, listener: Listener) -> None:
        """Tell it no more. Nothing if it is not told."""
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not listener]

    def look(self) -> None:
        """Tell all listeners of the world that waits, or of hosts that will be in one.

        They are told again if they know of it.
        """
        client = membership.client()
        change = None if client is None else client.change
        others_come = client is not None and client.others_come
        if change is not None or others_come:
            with self._lock:  # of two messages the later one has the later time, whatever the clock
                self._last = max(time.time(), self._last + 1e-6)
                timestamp = self._last
            kind = HostUpdateResult.added if change is None else _kind(*change)
            self.handle_hosts_updated(timestamp, kind)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners."""
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


def _kind(before: World, after: World) -> int:
    """Return how the ranks change; ``no_update`` where a failure has left all of them."""
    is_less = bool(before.numbers - after.numbers)
    is_more = bool(after.numbers - before.numbers)
    return HostUpdateResult.removed * is_less | HostUpdateResult.added * is_more


notification_manager = WorkerNotificationManager()

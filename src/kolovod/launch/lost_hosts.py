"""Other hosts that a launcher has lost sight of, and finds again: ranks may have gone on there."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from kolovod.errors import BootstrapError
from kolovod.launch.fleet import Fleet

__all__ = ["LostHosts"]

_AGAIN_S = 5.0


class LostHosts:
    """Tries to reach them, on a thread of its own, from ``start`` to ``close``."""

    def __init__(self, fleet: Fleet, ring: Callable[[], None]) -> None:
        """``ring()`` is called there when ``reached`` has something to tell."""
        self._fleet, self._ring = fleet, ring
        self._reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="kolovod lost hosts", daemon=True).start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closed.set()

    def reached(self) -> list[str]:
        """Those that were reached again since the last time."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reached.get_nowait())
        return found

    def _run(self) -> None:
        while not self._closed.wait(_AGAIN_S):
            for host in self._fleet.lost():
                with contextlib.suppress(BootstrapError):
                    if not self._fleet.connect([host], self._closed.is_set):
                        return
                    self._reached.put(host)
                    self._ring()

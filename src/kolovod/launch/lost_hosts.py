"""Other hosts that a launcher has lost sight of, and finds again: ranks may have gone on there."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kolovod.errors import BootstrapError
from kolovod.launch.fleet import Fleet

__all__ = ["LostHosts"]

_LOOK_S = 0.1
_END_S = 10.0
_FIRST_AGAIN_S, _AGAIN_S = 0.5, 5.0
"""Between two attempts: the first ones come soon, since mostly only the agent has ended."""


class LostHosts:
    """A thread that tries to reach them, from ``start`` to ``close``."""

    def __init__(self, fleet: Fleet, ring: Callable[[], None]) -> None:
        """``ring()`` is called there when ``reached`` has something to tell."""
        self._fleet, self._ring = fleet, ring
        self._reached: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kolovod lost hosts", daemon=True)

    def start(self) -> None:
        """Begin to look for them."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking for them. Idempotent.

        An agent that is being started here is waited for, so that the fleet ends it as well.
        """
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def reached(self) -> list[str]:
        """Return the hosts that were reached again since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._reached.get_nowait())
        return found

    def _run(self) -> None:
        due: dict[str, tuple[float, float]] = {}  # when it is tried, and how long after that again
        while not self._closed.wait(_LOOK_S):
            lost = self._fleet.lost()
            now = time.monotonic()
            for host in [host for host, (at_s, _) in due.items() if now > at_s + _AGAIN_S]:
                if host not in lost:  # and was not for some time
                    del due[host]
            for host in lost:
                at_s, pause_s = due.get(host, (0.0, _FIRST_AGAIN_S))
                if time.monotonic() < at_s:
                    continue
                with contextlib.suppress(BootstrapError):
                    if not self._fleet.connect([host], self._closed.is_set):
                        return
                    self._reached.put(host)
                    self._ring()
                due[host] = time.monotonic() + pause_s, min(2 * pause_s, _AGAIN_S)

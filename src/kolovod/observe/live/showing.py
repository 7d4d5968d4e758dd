"""A rank shows what it does, as long as somebody watches.

When a world is formed the process writes down what it is: rank, size, hosts. Until that ends a
thread waits at the bell of its page (page.py) and costs nothing there. Who rings gets five seconds
of what a timeline would record, renewed twice a second: the operations and spans of the last
seconds, those that are pending, and the counters of the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from kolovod import _native, notices
from kolovod.core import spans
from kolovod.core.world import World, when_engine_ends
from kolovod.observe.live.page import Page
from kolovod.observe.recorder import REPORT_S, PullInterval, Recorder, engines_of
from kolovod.observe.whereabouts import whereabouts
from kolovod.version import __version__

__all__ = ["LEASE_S", "enter", "leave"]

LEASE_S = 5.0
"""The time that a ring lasts."""
_KEPT_S = 3.0  # so who reads every two seconds misses nothing
_MOST = 2_000  # operations of a report, and spans: writing more of them down would take its time
_MOST_EVENTS = 20


class _Showing:
    """The page of a process, as long as that is in a world."""

    def __init__(self, world: World, worlds: list[dict[str, Any]]) -> None:
        """``worlds``: the last that it has been in. Raises OSError if there are no memory files."""
        self._page = Page()
        self._lock = threading.Lock()
        self._world: World | None = world
        self._worlds = worlds
        self._recorder = Recorder(self._engines, spans.log)
        self._reports: deque[tuple[float, str]] = deque()  # and when
        self._number = 0
        self._where = whereabouts()
        self._thread = threading.Thread(target=self._serve, name="kolovod-live", daemon=True)
        self._write({})
        self._thread.start()

    def leave(self) -> None:
        """Show that this process has left its world; the next world has another page."""
        with self._lock:
            self._recorder.switch(False)
            self._world = None
            self._write({})
        self._page.ring()
        self._thread.join()
        self._page.close()

    def pull(self) -> None:
        """Read what is new: an engine is about to go away."""
        with self._lock:
            self._pull()

    def _pull(self) -> int:
        with contextlib.suppress(_native.EngineError):  # the world has failed
            return self._recorder.pull()
        return 0

    def forget(self) -> None:
        """Close the page in a forked child."""
        self._page.close()

    def _engines(self) -> Mapping[str, _native.Engine]:
        world = self._world
        return {} if world is None else engines_of(world)

    def _serve(self) -> None:
        # Asked first: the ring of ``leave`` may have been heard while it recorded.
        while self._world is not None and self._page.is_watched(None):
            try:
                self._record()
            finally:
                with self._lock:
                    self._recorder.switch(False)
                    self._reports.clear()
                    self._write({})

    def _record(self) -> None:
        """Record and report as long as somebody rings."""
        until_s = time.monotonic() + LEASE_S
        due_s, pace = 0.0, PullInterval(REPORT_S)
        while (now_s := time.monotonic()) < until_s:
            with self._lock:  # in which a world does not end
                if self._world is None:
                    return
                self._recorder.switch(True)
                pause_s = pace.pause_s(self._pull())
                if now_s >= due_s:
                    due_s = now_s + REPORT_S
                    self._report(now_s)
            if self._page.is_watched(pause_s):
                until_s = time.monotonic() + LEASE_S

    def _report(self, now_s: float) -> None:
        """Add a report to the page, under the lock."""
        batch = self._recorder.take(_MOST)
        while rest := self._recorder.take(_MOST):
            batch.lost += len(rest.operations) + rest.lost
        self._number += 1
        said = {"operations": batch.operations, "spans": batch.spans, "lost": batch.lost}
        self._reports.append((now_s, json.dumps({"number": self._number, **said})))
        while self._reports[0][0] < now_s - _KEPT_S:
            self._reports.popleft()
        world = self._world
        assert world is not None
        try:
            more = {
                "at_ns": time.monotonic_ns(),
                "pending": self._recorder.pending()[:_MOST],
                "stats": world.engine.stats(),
                "sent_bytes": world.engine.sent_bytes(),
                "whereabouts": self._where,
            }
        except _native.EngineError:  # the world has failed; another one may follow
            more = {}
        self._write(more)

    def _write(self, more: Mapping[str, Any]) -> None:
        """Write the page, under the lock."""
        facts: dict[str, Any] = {"version": __version__, "pid": os.getpid(), "worlds": self._worlds}
        world = self._world
        if notices.kept:
            facts["notices"] = list(notices.kept)
        if world is not None:
            facts |= {
                "rank": world.rank,
                "size": world.size,
                "epoch": world.epoch,
                "host": world.host,
                "hosts": list(world.hosts),
                "backend": world.settings.backend,
                "job": _job_of(world),
                "slot": world.environment.slot if world.environment.coordinator else None,
            }
        opening = json.dumps({**facts, **more})[:-1]
        reports = ", ".join(text for _, text in self._reports)
        self._page.write([opening, ', "reports": [', reports, "]}"])


def _job_of(world: World) -> str:
    """Return a name for the job, the same on all ranks; the secret cannot be guessed from it."""
    secret = world.environment.secret or str(os.getpid())
    return hashlib.sha256(f"kolovod live {secret}".encode()).hexdigest()[:8]


_showing: _Showing | None = None
_worlds: list[dict[str, Any]] = []


def enter(world: World) -> None:
    """From now on this process is in ``world``, and shows it to who asks."""
    global _showing
    _worlds.append({"at_s": time.time(), "epoch": world.epoch, "size": world.size})
    del _worlds[:-_MOST_EVENTS]
    with contextlib.suppress(OSError):  # a sandbox without files in memory
        _showing = _Showing(world, list(_worlds))


def leave() -> None:
    """The world of this process is about to end."""
    global _showing
    showing, _showing = _showing, None
    if showing is not None:
        showing.leave()


def _pull() -> None:
    if _showing is not None:
        _showing.pull()


def _forget() -> None:
    global _showing
    _worlds.clear()
    if _showing is not None:
        _showing.forget()
        _showing = None


when_engine_ends(_pull)
os.register_at_fork(after_in_child=_forget)

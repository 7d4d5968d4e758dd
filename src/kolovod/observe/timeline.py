"""The timeline: one trace of all ranks, written by rank 0 while the job runs.

Every rank has a Recorder; that of rank 0 is read by a thread that writes the file, those of the
others by a thread that reports to rank 0 (collector.py). ``docs/timeline.md`` shows how to read it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kolovod import _native
from kolovod.config import Settings
from kolovod.core import spans
from kolovod.core.world import World, current, when_engine_ends
from kolovod.net.addresses import address_of, interface_to, listen
from kolovod.observe.collector import Collector, Reporter
from kolovod.observe.recorder import (
    PULL_MOST_S,
    PULL_S,
    REPORT_S,
    Batch,
    PullInterval,
    Recorder,
    engines_of,
)
from kolovod.observe.trace import Event, Trace
from kolovod.observe.trace_file import TraceFile
from kolovod.observe.whereabouts import whereabouts

__all__ = [
    "Opening",
    "begin",
    "end",
    "forget",
    "prepare",
    "pull",
    "start_timeline",
    "stop_timeline",
    "when_recording",
]

_DYNAMIC, _AT_ONCE = "dynamic", "at once"
_WHEN, _WHERE = "timeline", "timeline_address"  # rank 0's notes to the others
_MOST_PER_WRITE = 10_000


class Timeline:
    """The timeline of one world, on one rank."""

    def __init__(self, world: World, address: str = "") -> None:
        """``address``: of rank 0's collector if this rank is on another host than that, else ""."""
        self.recorder = Recorder(lambda: engines_of(world), spans.log)
        self._reporter: Reporter | None = None
        if world.rank > 0:
            self._reporter = Reporter(
                world.environment.secret,
                world.epoch,
                world.rank,
                world.size,
                self.recorder,
                address,
                encrypted=world.settings.encrypt,
            )

    def start(self, path: str, *, mark_cycles: bool) -> None:  # rank 0's matter
        """Record at once; rank 0 says when it is over."""
        if self._reporter is not None:
            if self.recorder.on:  # for another file, of which rank 0 knows whether it is the same
                return
            self._reporter.expect()

    def stop(self) -> None:
        """Return when rank 0 has stopped."""
        if self._reporter is not None:
            self._reporter.await_end()

    def close(self) -> None:
        """The world ends: report the rest."""
        if self._reporter is not None:
            self._reporter.close()


class Writer(Timeline):
    """Rank 0's timeline: it takes what all ranks have to say, and writes it."""

    def __init__(self, world: World, listeners: Sequence[socket.socket] = ()) -> None:
        """``listeners``: where ranks of other hosts report."""
        super().__init__(world)
        self._hosts, self._engine, self._here = world.hosts, world.engine, whereabouts()
        self._lock = threading.Lock()  # of the file, the trace and the events
        self._events: list[Event] = []
        self._trace: Trace | None = None
        self._file: TraceFile | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._collector: Collector | None = None
        if world.size > 1:
            self._collector = Collector(
                world.environment.secret, world.epoch, world.size, self._receive, listeners
            )

    def start(self, path: str, *, mark_cycles: bool) -> None:
        """Begin a file, from now on. Raises InvalidArgumentError if that is not possible."""
        if self._file is not None and self._file.path == path:
            return
        self.stop()
        trace = Trace(time.monotonic_ns(), time.time_ns(), mark_cycles=mark_cycles)
        file = TraceFile(path, trace.opening())
        with self._lock:
            self._trace, self._file, self._events = trace, file, []
        self.recorder.switch(True)
        if self._collector is not None:
            self._collector.start()
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve, name="kolovod-timeline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Get the rest from all ranks, and close the file, if there is one."""
        if self._file is None:
            return
        missing = self._collector.finish() if self._collector is not None else []
        if missing:
            ranks = ", ".join(map(str, missing))
            print(
                f"kolovod: the timeline {self._file.path} lacks rank {ranks}, or its end: no "
                "report came (every rank calls start_timeline, or KOLOVOD_TIMELINE is set)",
                file=sys.stderr,
            )
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self.recorder.switch(False)
        self._note_links()
        self._write()
        with self._lock:
            self._file.close()
            self._file = self._trace = None

    def close(self) -> None:
        """Stop, and close the connections; see ``Timeline.close``."""
        self.stop()
        if self._collector is not None:
            self._collector.close()

    def _receive(self, rank: int, batch: Batch) -> None:
        # A rank says where it is before it reports.
        at = self._collector.whereabouts.get(rank) if rank > 0 and self._collector else self._here
        with self._lock:
            if self._trace is not None:
                self._events += self._trace.add(rank, self._hosts[rank], batch, at)

    def _serve(self) -> None:
        try:
            written_s, pace, pause_s = 0.0, PullInterval(PULL_MOST_S), PULL_S
            while not self._stopping.wait(pause_s):
                pause_s = pace.pause_s(self.recorder.pull())
                if (now_s := time.monotonic()) >= written_s + REPORT_S:
                    written_s = now_s
                    self._write()
        except Exception as error:  # a defect; training goes on
            print(f"kolovod: the timeline ends here: {error!r}", file=sys.stderr)

    def _note_links(self) -> None:
        """Record at the end what the operations have shown of the links."""
        with contextlib.suppress(_native.EngineError):  # a lost rank has ended the world
            stats = self._engine.stats()
            if stats["link_bytes_per_us"] and self._trace is not None:
                bytes_per_s, latency_s = (
                    stats["link_bytes_per_us"] * 1e6,
                    stats["link_latency_ns"] / 1e9,
                )
                with self._lock:
                    self._events += self._trace.links(bytes_per_s, latency_s)

    def _write(self) -> None:
        while batch := self.recorder.take(_MOST_PER_WRITE):
            self._receive(0, batch)
        with self._lock:
            events, self._events = self._events, []
            file = self._file
            if file is None or file.failure:
                return
            file.append(events)
            if file.failure:
                print(
                    f"kolovod: the timeline {file.path} ends here: {file.failure}", file=sys.stderr
                )


_lock = threading.RLock()
_timeline: Timeline | None = None
_recording_hooks: list[Callable[[], None]] = []


def when_recording(hook: Callable[[], None]) -> None:
    """Call ``hook`` before this process first records, if it ever does; maybe more than once."""
    _recording_hooks.append(hook)
    if _timeline is not None:
        hook()


@dataclass
class Opening:
    """A timeline whose world is not there yet."""

    notes: Mapping[str, str] = field(default_factory=dict)
    """The notes that rank 0 tells the others as they meet."""
    listeners: list[socket.socket] = field(default_factory=list)
    """The sockets at which ranks of other hosts will report."""

    def take(self) -> list[socket.socket]:
        """Return the listeners, which the caller closes from now on."""
        taken, self.listeners = self.listeners, []
        return taken

    def close(self) -> None:
        """Close what was not taken."""
        for listener in self.take():
            listener.close()


def prepare(settings: Settings, size: int, rendezvous: str) -> Opening:
    """Decide for all ranks, on the one that will be 0, before it meets the others.

    So forming a world needs no collective operation, and another one may go on beside it.
    ``rendezvous``: ranks of other hosts report to the interface that reaches it. Raises
    BootstrapError if nothing can listen there.
    """
    path = settings.timeline.strip()
    if not path:
        return Opening()
    listeners = listen([interface_to(rendezvous)], backlog=64 + size) if size > 1 else []
    when = _DYNAMIC if path.lower() == _DYNAMIC else _AT_ONCE
    return Opening({_WHEN: when, _WHERE: "".join(map(address_of, listeners))}, listeners)


def begin(world: World, notes: Mapping[str, str], opening: Opening) -> None:
    """A world has been formed. ``notes``: rank 0's, whose ``opening`` it is.

    Raises InvalidArgumentError if the file cannot be written.
    """
    when = notes.get(_WHEN, "")
    if not when:
        return
    path = ""
    is_elsewhere = world.hosts[world.rank] != world.hosts[0]
    if world.rank == 0:
        _set(Writer(world, opening.take() if len(set(world.hosts)) > 1 else ()))
        path = world.settings.timeline.strip()
        path = path if world.epoch == 1 else _path_of_world(path, world.epoch)
    else:
        _set(Timeline(world, notes.get(_WHERE, "") if is_elsewhere else ""))
    if when == _AT_ONCE:
        assert _timeline is not None
        _timeline.start(path, mark_cycles=world.settings.timeline_mark_cycles)


def end() -> None:
    """The world of this process is about to end."""
    global _timeline
    with _lock:
        timeline, _timeline = _timeline, None
    if timeline is not None:
        timeline.close()


def forget() -> None:
    """Forget the timeline in a forked child: threads, connections and the file are the parent's."""
    global _lock, _timeline
    _lock, _timeline = threading.RLock(), None
    spans.log.forget()


def pull() -> None:
    """Read what is new: an engine is about to go away."""
    timeline = _timeline
    if timeline is not None:
        timeline.recorder.pull()


when_engine_ends(pull)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record what all ranks do, into a file for Perfetto or chrome://tracing.

    Rank 0 writes, whatever ``file_path`` the others give. The file is valid at every moment. Call
    it on every rank: those that do not are missing in it, unless KOLOVOD_TIMELINE=dynamic was set
    when the world was formed (with several hosts that must be set, and then rank 0's call is
    enough). A timeline that is being recorded into another file is stopped first.

    ``mark_cycles``: mark the start of every bucket, as CYCLE_START.

    Raises InvalidArgumentError if the file cannot be made, NotInitializedError.
    """
    world = current()
    path = os.fspath(file_path)
    with _lock:
        if _timeline is None:
            _set(Writer(world) if world.rank == 0 else Timeline(world))
        assert _timeline is not None
        _timeline.start(path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """End the timeline; return when the file is complete, on every rank that calls it.

    Other ranks than 0 wait for rank 0 to call it, for a second at most.

    Raises NotInitializedError.
    """
    current()
    with _lock:
        if _timeline is not None:
            _timeline.stop()


def _set(timeline: Timeline) -> None:
    global _timeline
    for hook in _recording_hooks:
        hook()
    with _lock:
        _timeline = timeline


def _path_of_world(path: str, epoch: int) -> str:
    """Return another path, so a later world (after a failure, say) overwrites nothing."""
    parts = Path(path)
    return str(parts.with_name(f"{parts.stem}.world{epoch}{parts.suffix}"))

"""Ranks that wait for each other for ever: one error on all of them, within seconds.

A rank that makes one operation more than the others waits for it while they wait for the next: none
can ever complete. Once every thread of a process that runs the user's script waits for operations,
nothing in it can submit any more. Then it says to the other ranks which operations are pending in
it (csrc/engine/wait_board.h), and takes that back before it goes on. A rank can never go on if each
of its pending operations lacks a rank that can never go on.

What ranks have said may be old when it is read (a process was stopped, a network was slow), so it
counts only between ranks that have begun the same number of buckets: had one gone on since, it or
the other would have begun more. The same holds for messages between two ranks: a rank that waits
for one counts only if nothing is on its way that could end that.

A framework that computes in threads of its own (a graph of TensorFlow, a program of JAX) waits in
them, and tells nobody. There a thread looks on: a process whose script is held up by the framework
says what is pending once all of its threads have slept for seconds (framework_waits.py). So that is
no certainty, and who waits with such a rank counts only if its own threads sleep, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from kolovod import _native
from kolovod.core import world as worlds
from kolovod.core.call_lines import script_frame
from kolovod.core.framework_waits import PERIOD_S, Looks
from kolovod.core.standings import (
    Message,
    Scope,
    Standing,
    decode,
    encode,
    find_deadlock,
    key_of,
    text_of,
    without_counts,
)
from kolovod.core.world import World
from kolovod.errors import NotInitializedError

__all__ = ["bounded", "stands_for", "waits_within", "watch"]

_STEADY_S = 0.3  # so long nothing that the ranks have said may change
_STEADY_WITHIN_FRAMEWORKS_S = 2.0  # the same if one of them is held up by a framework
_MOST_NAME = 120
_MOST_LINE = 100
_MOST_MEMBERS = 64  # of a process set that is listed


def watch(on: bool) -> None:
    """Look for ranks that wait for each other from now on, or not. The same on all ranks."""
    _native.watch_long_waits(_watch.note if on else None)
    _watch.turn(on)


def waits_within(*libraries: str) -> None:
    """Say that a framework's graphs wait within its native libraries, whose paths begin so.

    Without that, threads that wait there count as ones that may go on.
    """
    _watch.looks.know(*libraries)
    _watch.begin_to_look()


def stands_for(callback: CodeType, callers: Iterable[CodeType]) -> None:
    """Say that who waits in ``callback`` holds up a thread whose innermost call is a caller.

    So it is where a framework calls back in a thread of its own, and its caller goes on after that.
    """
    _callbacks.add(callback)
    _callers.update(callers)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within this context the waits here are no part of a deadlock: a timer ends them."""
    _watch.bound(1)
    try:
        yield
    finally:
        _watch.bound(-1)


class _Watch:
    """Knows the waits of this process, and what it has said of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may wait in the middle of `note`
        self._waits: dict[int, tuple[_native.Engine, int, str]] = {}
        self._said: tuple[_native.Engine, bytes] | None = None
        self._seen: tuple[object, float] = None, 0.0
        self._bounds = 0
        self.looks = Looks()
        self._progress: list[tuple[int, int]] = []
        self._held: dict[int, str] = {}  # what a framework holds up, while that is said: lines
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def forget(self) -> None:
        """Forget the parent's threads in a forked child."""
        libraries = self.looks.libraries
        self.__init__()  # type: ignore[misc]
        self.looks.libraries = libraries

    def turn(self, on: bool) -> None:
        """Look at the frameworks' threads from now on, or not."""
        if self._end is not None:
            self._end.set()
        if self._thread is not None:
            self._thread.join(PERIOD_S)  # not longer: a signal handler's caller may hold the lock
        self._end, self._thread = threading.Event() if on else None, None
        self.begin_to_look()

    def begin_to_look(self) -> None:
        """Start the thread that looks, if there is a framework."""
        if self._end is not None and self._thread is None and self.looks.libraries:
            self._thread = threading.Thread(
                target=self._serve, args=(self._end,), name="kolovod-deadlocks", daemon=True
            )
            self._thread.start()

    def _serve(self, end: threading.Event) -> None:
        while not end.wait(PERIOD_S):
            with self._lock, contextlib.suppress(NotInitializedError):
                self._look(worlds.current())

    def _look(self, world: World) -> None:
        """Say what is pending if frameworks hold up what runs the script here, and have rested."""
        engines = [world.engine, *world.sets.engines]
        pending = [engine.pending() for engine in engines]
        progress = list(zip(pending, (e.stats()["operations"] for e in engines), strict=True))
        held: set[int] = set()
        if not any(pending) or progress != self._progress:
            self.looks.restart()
        else:
            held = self.looks.look(self._waits)
        self._progress = progress
        may_say = bool(held) and self.looks.at_rest and not self._bounds
        lines = _lines(held) if may_say and self._all_wait(held) else None
        if lines is not None:
            self._held = lines
            self._judge(world)
        elif self._held:
            self._take_back()

    def bound(self, more: int) -> None:
        """Add ``more`` to the contexts in which somebody else ends this process's waits."""
        with self._lock:
            self._bounds += more

    def note(self, engine: _native.Engine, handle: int, waits: bool) -> None:
        """Note that the calling thread waits for an operation of ``engine``, or goes on."""
        with self._lock:
            thread = threading.get_ident()
            if not waits:
                self._waits.pop(thread, None)
                self.looks.restart()
                self._take_back()
                return
            self._waits[thread] = engine, handle, _line(sys._getframe(1))
            if (
                not self._bounds
                and worlds.is_initialized()
                and self._all_wait()
                and not _is_in_handler(sys._getframe(1))
            ):
                self._held = {}
                self._judge(worlds.current())
            elif not self._held:
                self._take_back()

    def _all_wait(self, held: Container[int] = ()) -> bool:
        """Return whether no thread of this process is left that might submit an operation.

        ``held``: the threads that a framework holds up.
        """
        main, held_up, stand_for_others = threading.main_thread().ident, 0, 0
        for thread, frame in sys._current_frames().items():
            if thread in self._waits:
                stand_for_others += _stands_for_another(frame)
            elif thread in held:
                continue
            elif thread == main or script_frame(frame) is not None:
                if frame.f_code not in _callers:
                    return False
                held_up += 1
        return held_up <= stand_for_others

    def _judge(self, world: World) -> None:
        standing = self._standing(world)
        if standing is None or not (
            self._say(world.engine, encode(standing))
            or self._say(world.engine, encode(without_counts(standing)))
        ):
            self._take_back()
            return
        said, versions = {}, {}
        for rank, version, other in world.engine.read_waits():
            said[rank], versions[rank] = decode(other), version
        stuck = find_deadlock(said, world.size)
        seen = [(rank, versions[rank]) for rank in stuck]
        now_s = time.monotonic()
        if seen != self._seen[0]:
            self._seen = seen, now_s
        elif world.rank in stuck and now_s - self._seen[1] >= (
            _STEADY_WITHIN_FRAMEWORKS_S
            if any(said[rank].within_framework for rank in stuck)
            else _STEADY_S
        ):
            world.engine.refuse(text_of(said, stuck))

    def _standing(self, world: World) -> Standing | None:
        """Return this rank's statement; None if it cannot tell all that is pending in it."""
        engines: dict[_native.Engine, tuple[int, ...] | None] = {world.engine: None}
        for members in world.sets.by_id.values():
            if members.engine is not None:
                engines[members.engine] = tuple(members.ranks)
        if any(engine not in engines for engine in world.sets.engines):
            return None  # a group of torch.distributed's
        scopes, pending, where = {}, set(), ""
        messages: set[Message] = set()
        before = {engine: engine.exchanged() for engine in engines}
        for engine, members in engines.items():
            name = "" if members is None else key_of(repr(members))
            buckets, is_complete, operations = engine.standing()
            if not is_complete or (members is not None and len(members) > _MOST_MEMBERS):
                return None
            verbs = {verb for _, verb in operations}
            places = range(world.size) if members is None else members
            counts = zip(places, before[engine], strict=True)
            exchanged = {rank: each for rank, each in counts if any(each)}
            scopes[name] = Scope(members, buckets, "join" in verbs, "recv" in verbs, exchanged)
            pending |= {
                (name, key_of(str(key))) for key, verb in operations if verb not in _MESSAGES
            }
        for engine, handle, line in self._waits.values():
            described = engine.describe(handle) if engine in engines else None
            if described is None:
                return None
            members = engines[engine]
            what = f"{described[1]} '{described[0][:_MOST_NAME]}'"
            if described[1] in _MESSAGES:
                asks = engine.asks(handle)
                if asks is None:  # it is on its way
                    return None
                verb, place = asks
                peer = place if members is None or place < 0 else members[place]
                messages.add(("" if members is None else key_of(repr(members)), verb, peer))
                at_end = "from" if verb == "recv" else "to"
                what = f"{verb} {at_end} {'any rank' if peer < 0 else f'rank {peer}'}"
            if not where:
                among = "" if members is None else f" of process set {list(members)}"
                where = f"{what}{among}{line}"
        if self._held and not where:
            where = f"{_oldest(engines)}{next(iter(self._held.values()))}"
        if any(engine.exchanged() != counts for engine, counts in before.items()):
            return None  # what was read of messages does not belong together
        at_rest = not self.looks.libraries or self.looks.at_rest
        return Standing(
            scopes, frozenset(pending), where, frozenset(messages), bool(self._held), at_rest
        )

    def _say(self, engine: _native.Engine, text: bytes) -> bool:
        if self._said == (engine, text):
            return True
        if not engine.say_waits(text):
            return False
        self._said = engine, text
        return True

    def _take_back(self) -> None:
        if self._said is not None:
            self._said[0].say_waits(b"")
            self._said = None
        self._held = {}


def _lines(threads: Iterable[int]) -> dict[int, str] | None:
    """Return the script's line at which each of ``threads`` is; None while a handler runs."""
    frames = sys._current_frames()
    if _is_in_handler(frames.get(threading.main_thread().ident or 0)):
        return None
    return {thread: _line(frames.get(thread)) for thread in threads}


def _line(frame: FrameType | None) -> str:
    """Return the script's line at which a thread is, as " at train.py:12"; "" outside of it."""
    frame = script_frame(frame)
    if frame is None:
        return ""
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f" at {file[-_MOST_LINE:]}:{frame.f_lineno}"


def _oldest(engines: Mapping[_native.Engine, tuple[int, ...] | None]) -> str:
    """The first operation that was submitted and is pending: "allreduce 'loss'"."""
    pending = [
        (record["submitted_ns"], record, members)
        for engine, members in engines.items()
        for record in engine.last_operations()
        if record["state"] in ("submitted", "started")
    ]
    if not pending:
        return ""
    _, record, members = min(pending, key=lambda each: each[0])
    among = "" if members is None else f" of process set {list(members)}"
    return f"{record['verb']} '{record['name'][:_MOST_NAME]}'{among}"


def _stands_for_another(frame: FrameType | None) -> bool:
    """Return whether a thread runs a callback whose caller is in another thread."""
    is_in_callback = False
    while frame is not None:
        if frame.f_code in _callers:
            return False
        is_in_callback = is_in_callback or frame.f_code in _callbacks
        frame = frame.f_back
    return is_in_callback


def _is_in_handler(frame: FrameType | None) -> bool:
    """Return whether a signal handler runs here: other ranks may get the signal much later."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while frame is not None and handlers:
        if frame.f_code in handlers:
            return True
        frame = frame.f_back
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)


_MESSAGES = ("send", "recv")
_watch = _Watch()
_callbacks: set[CodeType] = set()
_callers: set[CodeType] = set()
"""See ``stands_for``."""


os.register_at_fork(after_in_child=_watch.forget)

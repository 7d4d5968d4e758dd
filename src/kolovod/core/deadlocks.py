"""Ranks that wait for each other for ever: one error on all of them, within a second.

A rank that makes one operation more than the others waits for it while they wait for the next: none
can ever complete. Once every thread of a process that runs the user's script waits for operations,
nothing in it can submit any more. Then it says to the other ranks which operations are pending in
it (csrc/engine/wait_board.h), and takes that back before it goes on. A rank can never go on if each
of its pending operations lacks a rank that can never go on.

What ranks have said may be old when it is read (a process was stopped, a network was slow), so it
counts only between ranks that have begun the same number of buckets: had one gone on since, it or
the other would have begun more. The same holds for messages between two ranks: a rank that waits
for one counts only if nothing is on its way that could end that.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kolovod import _native
from kolovod.core import world as worlds
from kolovod.core.call_lines import script_frame
from kolovod.core.world import World

__all__ = ["Scope", "Standing", "bounded", "find_deadlock", "stands_for", "text_of", "watch"]

_STEADY_S = 0.3  # so long nothing that the ranks have said may change
_MOST_NAME = 120
_MOST_LINE = 100
_MOST_TEXT = 700
_MOST_MEMBERS = 64  # of a process set that is listed

Operation = tuple[str, str]
"""Its scope, and the hash of its name."""
Message = tuple[str, str, int]
"""Its scope, "send" or "recv", and the rank that is to meet it; -1: any."""
Counts = tuple[int, int, int, int]
"""Messages sent to a rank, and seen of it; its offers answered, and its answers to ours."""


class Scope(NamedTuple):
    """The world, or a process set, as one of its ranks sees it."""

    members: tuple[int, ...] | None
    """None: all ranks."""
    buckets: int
    """How many have begun."""
    has_joined: bool
    """The rank contributes zeros to whatever the others submit."""
    receives: bool = False
    """A recv is pending."""
    exchanged: Mapping[int, Counts] | None = {}
    """Of messages, by rank, but for those with none; None: too many to be told."""


class Standing(NamedTuple):
    """What a rank says while all that runs the script in it waits."""

    scopes: Mapping[str, Scope]
    pending: frozenset[Operation]
    where: str
    """The operation that it waits for, and the line: "allreduce 'loss' at train.py:12"."""
    messages: frozenset[Message] = frozenset()
    """Those that it waits for."""


def find_deadlock(said: Mapping[int, Standing], size: int) -> list[int]:
    """The ranks that can never go on, by what the ranks of a world of ``size`` have said."""

    def lacks(rank: int, operation: Operation) -> set[int]:
        scope = said[rank].scopes[operation[0]]
        found = set()
        for other in range(size) if scope.members is None else scope.members:
            standing = said.get(other)
            theirs = standing and standing.scopes.get(operation[0])
            if standing is None or not theirs or other == rank or operation in standing.pending:
                continue
            if theirs.buckets == scope.buckets and not theirs.has_joined:
                found.add(other)
        return found

    def meets(rank: int, message: Message) -> set[int]:
        """The ranks one of which is to meet it; empty if something is on its way."""
        name, verb, peer = message
        scope = said[rank].scopes[name]
        members = range(size) if scope.members is None else scope.members
        found = {peer} if peer >= 0 else {other for other in members if other != rank}
        for other in found:
            theirs = said[other].scopes.get(name) if other in said else None
            if theirs is None or theirs.exchanged is None or scope.exchanged is None:
                return set()
            sent, seen, _, answers = scope.exchanged.get(other, _NOTHING)
            their_sent, their_seen, answered, _ = theirs.exchanged.get(rank, _NOTHING)
            if verb == "recv":
                is_level = their_sent == seen
            else:  # who receives nothing need not have seen it
                is_level = answered == answers and (their_seen == sent or not theirs.receives)
            if not is_level:
                return set()
        return found

    lacking = {
        rank: [lacks(rank, operation) for operation in standing.pending]
        for rank, standing in said.items()
    }
    meeting = {
        rank: [meets(rank, message) for message in standing.messages]
        for rank, standing in said.items()
    }

    def may_go_on(rank: int) -> bool:
        return any(not others & stuck for others in lacking[rank]) or any(
            not others or others - stuck for others in meeting[rank]
        )

    stuck = {rank for rank in said if lacking[rank] or meeting[rank]}
    while free := set(filter(may_go_on, stuck)):
        stuck -= free
    return sorted(stuck)


def text_of(said: Mapping[int, Standing], stuck: list[int]) -> str:
    """The error for ``stuck`` ranks."""
    by_place: dict[str, list[str]] = {}
    for rank in stuck:
        by_place.setdefault(said[rank].where, []).append(str(rank))
    waits = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} in {where}"
        for where, ranks in by_place.items()
    )
    if len(waits) > _MOST_TEXT:
        waits = f"{waits[:_MOST_TEXT]}..."
    return (
        f"ranks wait for different operations, so that none can ever complete: {waits}. See "
        "whether a rank takes one step, or one operation, more than another"
    )


def watch(on: bool) -> None:
    """Look for ranks that wait for each other from now on, or not. The same on all ranks."""
    _native.watch_long_waits(_watch.note if on else None)


def stands_for(callback: CodeType, callers: Iterable[CodeType]) -> None:
    """A thread that waits in ``callback`` holds up another one, whose innermost call is a caller.

    So it is where a framework calls back in a thread of its own, and its caller goes on after that.
    """
    _callbacks.add(callback)
    _callers.update(callers)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within it the waits of this process are no part of a deadlock: a timer ends them."""
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

    def bound(self, more: int) -> None:
        """Of so many more contexts this process's waits are ended by somebody else."""
        with self._lock:
            self._bounds += more

    def note(self, engine: _native.Engine, handle: int, waits: bool) -> None:
        """The calling thread waits for an operation of ``engine``, or goes on."""
        with self._lock:
            thread = threading.get_ident()
            if not waits:
                self._waits.pop(thread, None)
                self._take_back()
                return
            frame = script_frame(sys._getframe(1))
            file = "" if frame is None else frame.f_code.co_filename.rpartition("/")[2]
            line = "" if frame is None else f" at {file[-_MOST_LINE:]}:{frame.f_lineno}"
            self._waits[thread] = engine, handle, line
            if (
                not self._bounds
                and worlds.is_initialized()
                and self._all_wait()
                and not _is_in_handler(sys._getframe(1))
            ):
                self._judge(worlds.current())
            else:
                self._take_back()

    def _all_wait(self) -> bool:
        """Whether no thread of this process is left that might submit something."""
        main, held_up, stand_for_others = threading.main_thread().ident, 0, 0
        for thread, frame in sys._current_frames().items():
            if thread in self._waits:
                stand_for_others += _stands_for_another(frame)
            elif thread == main or script_frame(frame) is not None:
                if frame.f_code not in _callers:
                    return False
                held_up += 1
        return held_up <= stand_for_others

    def _judge(self, world: World) -> None:
        standing = self._standing(world)
        if standing is None or not (
            self._say(world.engine, _encode(standing))
            or self._say(world.engine, _encode(_without_counts(standing)))
        ):
            self._take_back()
            return
        said, versions = {}, {}
        for rank, version, other in world.engine.read_waits():
            said[rank], versions[rank] = _decode(other), version
        stuck = find_deadlock(said, world.size)
        seen = [(rank, versions[rank]) for rank in stuck]
        now_s = time.monotonic()
        if seen != self._seen[0]:
            self._seen = seen, now_s
        elif world.rank in stuck and now_s - self._seen[1] >= _STEADY_S:
            world.engine.refuse(text_of(said, stuck))

    def _standing(self, world: World) -> Standing | None:
        """What this rank can say; None: not all that is pending in it can be told."""
        engines: dict[_native.Engine, tuple[int, ...] | None] = {world.engine: None}
        for members in world.sets.by_id.values():
            if members.engine is not None:
                engines[members.engine] = tuple(members.ranks)
        if any(engine not in engines for engine in world.sets.engines):
            return None  # a group of torch.distributed's
        scopes, pending, messages, where = {}, set(), set(), ""
        before = {engine: engine.exchanged() for engine in engines}
        for engine, members in engines.items():
            name = "" if members is None else _key(repr(members))
            buckets, is_complete, operations = engine.standing()
            if not is_complete or (members is not None and len(members) > _MOST_MEMBERS):
                return None
            verbs = {verb for _, verb in operations}
            places = range(world.size) if members is None else members
            counts = zip(places, before[engine], strict=True)
            exchanged = {rank: each for rank, each in counts if any(each)}
            scopes[name] = Scope(members, buckets, "join" in verbs, "recv" in verbs, exchanged)
            pending |= {(name, _key(str(key))) for key, verb in operations if verb not in _MESSAGES}
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
                messages.add(("" if members is None else _key(repr(members)), verb, peer))
                at_end = "from" if verb == "recv" else "to"
                what = f"{verb} {at_end} {'any rank' if peer < 0 else f'rank {peer}'}"
            if not where:
                among = "" if members is None else f" of process set {list(members)}"
                where = f"{what}{among}{line}"
        if any(engine.exchanged() != counts for engine, counts in before.items()):
            return None  # what was read of messages does not belong together
        return Standing(scopes, frozenset(pending), where, frozenset(messages))

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


def _stands_for_another(frame: FrameType | None) -> bool:
    """Whether a thread is in a callback, whose caller is in another thread."""
    is_in_callback = False
    while frame is not None:
        if frame.f_code in _callers:
            return False
        is_in_callback = is_in_callback or frame.f_code in _callbacks
        frame = frame.f_back
    return is_in_callback


def _is_in_handler(frame: FrameType | None) -> bool:
    """Whether a signal handler runs here: the others' ranks may get the signal much later."""
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
_NOTHING: Counts = (0, 0, 0, 0)
_watch = _Watch()
_callbacks: set[CodeType] = set()
_callers: set[CodeType] = set()
"""See ``stands_for``."""


def _key(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=6).hexdigest()


def _without_counts(standing: Standing) -> Standing:
    scopes = {name: scope._replace(exchanged=None) for name, scope in standing.scopes.items()}
    return standing._replace(scopes=scopes)


def _encode(standing: Standing) -> bytes:
    scopes = {
        name: [*scope[:4], scope.exchanged and list(scope.exchanged.items())]
        for name, scope in standing.scopes.items()
    }
    fields = [scopes, sorted(standing.pending), standing.where, sorted(standing.messages)]
    return json.dumps(fields, separators=(",", ":")).encode()


def _decode(text: bytes) -> Standing:
    """Raises ValueError or TypeError for what ``_encode`` has not made."""
    scopes, pending, where, messages = json.loads(text)
    return Standing(
        {
            name: Scope(
                members and tuple(members),
                buckets,
                has_joined,
                receives,
                None
                if exchanged is None
                else {rank: (c[0], c[1], c[2], c[3]) for rank, c in exchanged or ()},
            )
            for name, (members, buckets, has_joined, receives, exchanged) in scopes.items()
        },
        frozenset((scope, key) for scope, key in pending),
        where,
        frozenset((scope, verb, peer) for scope, verb, peer in messages),
    )

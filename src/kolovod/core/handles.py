"""Handles of asynchronous operations, and what keeps their buffers alive.

The engine reads and writes buffers by address until an operation is complete, whatever Python does
meanwhile. So a buffer's owner is referenced by its Handle, and when a Handle is dropped too early,
by the process's ``held_buffers``, until the engine says that it is done. There is one for all,
since what made the request (an optimizer, say) may be gone by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Generic, NoReturn, TypeVar

from kolovod import _native
from kolovod.core import spans
from kolovod.errors import InvalidArgumentError, from_engine

T = TypeVar("T")

_TIMEOUT = _native.STATUS["timeout"]
_FOREVER = -1.0


class HeldBuffers:
    """Holds buffers of operations that nobody waits for any more."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        """Start with nothing kept."""
        # One deque for good: threads add to it while another sweeps.
        self.kept: deque[tuple[_native.Engine, int, object]] = deque()

    def __bool__(self) -> bool:
        """Return whether any buffer is kept."""
        return bool(self.kept)

    def keep(self, engine: _native.Engine, number: int, buffers: object) -> None:
        """Forget operation ``number`` of ``engine``, or hold ``buffers`` until it is complete.

        A ``number`` of 0 means that the operation may have been submitted, but its number never
        reached us (an interrupt came in between); such buffers are held for good.
        """
        try:
            if number == 0 or not engine.release(number):
                self.kept.append((engine, number, buffers))
        except _native.EngineError:
            pass  # a forked child, or a number released before: the engine does not use the buffers

    def sweep(self) -> None:
        """Let go of what has completed since."""
        for _ in range(len(self.kept)):
            try:
                engine, number, buffers = self.kept.popleft()
            except IndexError:  # another thread sweeps, too
                return
            self.keep(engine, number, buffers)


held_buffers = HeldBuffers()
_native.use_keeper(held_buffers.keep)
kept = held_buffers.kept
"""The buffers that it keeps, nearly always none: they tell whether ``sweep`` has something to
do."""


_taking = threading.RLock()  # a collection of garbage may drop another handle within


class Handle(Generic[T]):
    """One asynchronous operation: ``poll`` it, then ``wait`` for its result, once.

    Made by the ``*_async`` verbs. Dropping a handle does not cancel the operation (the other ranks
    count on it), it only makes the result unreachable.
    """

    __slots__ = ("__weakref__", "_buffers", "_engine", "_finish", "_number", "_result")

    def __init__(
        self,
        engine: _native.Engine,
        number: int,
        buffers: object,
        result: Any,
        finish: Callable[[_native.Engine, int], T] | None,
    ) -> None:
        """``finish(engine, number)`` makes the result on completion; None: it is ``result``."""
        self._engine = engine
        self._number = number
        self._buffers = buffers
        self._result = result
        self._finish = finish

    def __repr__(self) -> str:
        """Say whether the result is still to be had."""
        return f"<kolovod Handle {self._number or 'used'}>"

    def poll(self) -> bool:
        """Return whether ``wait`` would return or raise at once; True after it has returned."""
        number = self._number
        if number == 0:
            return True
        try:
            return self._engine.poll(number)
        except _native.EngineError as error:
            if self._number == 0:  # another thread has taken the result meanwhile
                return True
            raise from_engine(error) from None

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result when the operation is complete; a handle gives it once.

        ``timeout_s``: at most so many seconds; None waits without limit. Raises WaitTimeoutError
        when they are over (the operation is still pending and may be waited for again),
        MismatchError when the ranks did not submit the same thing, RankLostError and its siblings
        when a rank is gone, InvalidArgumentError for a second wait.
        """
        if timeout_s is None:
            timeout_s = _FOREVER
        elif not timeout_s >= 0:
            raise InvalidArgumentError(
                f"timeout_s is {timeout_s!r}: give seconds >= 0, or None to wait without limit"
            )
        return self._drive(timeout_s, drives=False)

    def _drive(self, timeout_s: float, *, drives: bool = True) -> T:
        """``wait``, but by driving the engine also when there is a limit (< 0: none).

        Faster than leaving that to the engine's thread; but a limit that is over in the middle of
        the operation ends the world.
        """
        number = self._number
        if number == 0:
            raise _waited_before()
        engine = self._engine
        start_ns = monotonic_ns() if spans.log.on else 0
        try:
            engine.wait(number, timeout_s, drives)
            if start_ns:
                spans.log.add(spans.WAIT, start_ns, monotonic_ns())
        except _native.EngineError as error:
            self._failed(error)
        number, buffers, result, finish = self._take()
        if number == 0:  # another thread was faster
            raise _waited_before()
        try:
            return result if finish is None else finish(engine, number)
        finally:
            held_buffers.keep(engine, number, buffers)

    def _failed(self, error: _native.EngineError) -> NoReturn:
        if error.args[0] != _TIMEOUT:
            self._let_go()
        raise from_engine(error) from None

    def _take(self) -> tuple[int, object, Any, Callable[[_native.Engine, int], T] | None]:
        """Take all fields, for one thread only; the others get a number of 0."""
        with _taking:
            taken = self._number, self._buffers, self._result, self._finish
            self._number, self._buffers, self._result, self._finish = 0, None, None, None
        return taken

    def _let_go(self) -> None:
        number, buffers, _, _ = self._take()
        if number != 0:
            held_buffers.keep(self._engine, number, buffers)

    def __del__(self) -> None:
        """Leave the buffers to ``held_buffers`` if the engine may still use them."""
        if self._number != 0:
            self._let_go()


def _waited_before() -> InvalidArgumentError:
    return InvalidArgumentError(
        "this handle was waited for before, and gives its result once; keep the result"
    )

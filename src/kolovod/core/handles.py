"""Handles of asynchronous operations, and what keeps their buffers alive.

The engine reads and writes buffers by address until an operation is complete, whatever Python does
meanwhile. So a buffer's owner is referenced by its Handle, and when a Handle is dropped too early,
by the process's ``held_buffers``, until the engine says that it is done. There is one for all,
since what made the request (an optimizer, say) may be gone by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kolovod import _native
from kolovod.core import spans
from kolovod.errors import InvalidArgumentError, from_engine

T = TypeVar("T")


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


class Handle(_native.Handle, Generic[T]):
    """One asynchronous operation: ``poll`` it, then ``wait`` for its result, once.

    Made by the ``*_async`` verbs. Dropping a handle does not cancel the operation (the other ranks
    count on it), it only makes the result unreachable.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # written in C (csrc/bind/handle.h): hundreds may be under way

        def __init__(
            self,
            engine: _native.Engine,
            number: int,
            buffers: object,
            result: Any,
            finish: Callable[[_native.Engine, int], T] | None,
        ) -> None:
            """``finish(engine, number)`` makes the result on completion; None: it is ``result``."""

        def poll(self) -> bool:
            """Return whether ``wait`` would return or raise at once; True after it has returned."""

        def wait(self, timeout_s: float | None = None) -> T:
            """Return the result when the operation is complete; a handle gives it once.

            ``timeout_s``: at most so many seconds; None waits without limit. Raises
            WaitTimeoutError when they are over (the operation is still pending and may be waited
            for again), MismatchError when the ranks did not submit the same thing, RankLostError
            and its siblings when a rank is gone, InvalidArgumentError for a second wait.
            """

        def _drive(self, timeout_s: float) -> T:
            """``wait``, but by driving the engine also when there is a limit (< 0: none).

            Faster than leaving that to the engine's thread; but a limit that is over in the middle
            of the operation ends the world.
            """


def _failed(error: _native.EngineError) -> NoReturn:
    raise from_engine(error) from None


def _refused(timeout_s: object) -> NoReturn:
    if timeout_s is None:
        raise InvalidArgumentError(
            "this handle was waited for before, and gives its result once; keep the result"
        )
    raise InvalidArgumentError(
        f"timeout_s is {timeout_s!r}: give seconds >= 0, or None to wait without limit"
    )


_native.use_handles(spans.log, _failed, _refused)

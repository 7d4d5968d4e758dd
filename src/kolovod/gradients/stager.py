"""Buckets of gradients that are on a GPU: the thread that submits them when their copies are there.

A hook must not wait for the GPU, which is far behind the host. So it enqueues the copy to pinned
memory and leaves the rest to this thread: wait for the copy's event [1], submit [2].
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kolovod import _native
from kolovod.core.handles import held_buffers

_IDLE_S = 0.1  # to start a thread anew costs 0.1 ms


class Event(Protocol):
    """A place in a stream of a device."""

    def synchronize(self) -> None:
        """Wait, on the host, until the device has come to it."""
        ...

    def query(self) -> bool:
        """Return whether the device has come to it."""
        ...


class Queued:
    """One bucket that is being copied, or has been submitted since."""

    def __init__(
        self,
        events: Sequence[Event],
        submit: Callable[[], int],
        engine: _native.Engine,
        buffers: object,
    ) -> None:
        """``submit()`` returns the number in ``engine``; ``buffers`` live until it is complete.

        They hold the gradients, too: until the copies' events nobody else may get their memory.
        """
        self._events = events
        self._submit = submit
        self.engine = engine
        self._buffers = buffers
        self._lock = threading.RLock()  # a collection of garbage within may let go of it
        self._over = threading.Event()
        self._is_let_go = False
        self._number = 0
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do [1] and [2], in the thread."""
        number, error = 0, None
        try:
            for event in self._events:
                event.synchronize()
            number = self._submit()
        except BaseException as failure:  # of CUDA or the engine; raised by `number`
            error = failure
        with self._lock:
            self._number, self._error = number, error
            self._over.set()
            if self._is_let_go:
                self._keep()

    def number(self) -> int:
        """The number in the engine, as soon as there is one. Raises what the thread caught."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._number

    def let_go(self) -> None:
        """Wait for it no more. It is submitted all the same: other ranks count on it."""
        with self._lock:
            self._is_let_go = True
            if self._over.is_set():
                self._keep()

    def _keep(self) -> None:
        """Leave the buffers to ``held_buffers``: once, whoever comes first."""
        number, self._number = self._number, 0
        buffers, self._buffers = self._buffers, None
        if number:
            held_buffers.keep(self.engine, number, buffers)


class Stager:
    """Runs what is queued, in order, in a thread that is there while there is work."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._queue: queue.SimpleQueue[Queued] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_serving = False

    def put(self, queued: Queued) -> None:
        """Let the thread run it after those before."""
        with self._lock:
            self._queue.put(queued)
            if self._is_serving:
                return
            # A daemon: a GPU that hangs must not keep the process from ending.
            thread = threading.Thread(target=self._serve, name="kolovod-stager", daemon=True)
            thread.start()
            self._is_serving = True

    def _serve(self) -> None:
        while True:
            try:
                self._queue.get(timeout=_IDLE_S).run()  # and hold nothing of it afterwards
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._is_serving = False
                        return


stager = Stager()
"""The stager of all reducers of this process."""


def _after_fork_in_child() -> None:
    """The thread is the parent's."""
    stager.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_after_fork_in_child)

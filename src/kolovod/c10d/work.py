"""Works and futures, which the verbs return, and the threads that drive them.

Nothing of ours happens in the background where cores are scarce (docs/design/engine.md): a thread
that waits drives the engine. ``Work.wait`` does. A future may be waited for in C++, unseen by us:

- DDP takes a future for every bucket while backward runs, and waits for them in a callback at its
  end. We put a callback of our own before that one, which waits for them here.
- Other futures are waited for by a thread, the group's watcher, as soon as they are made.

The watcher also takes what a backward has left behind, because it failed or lasts long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kolovod.c10d import staging
from kolovod.c10d.order import Order
from kolovod.core import spans
from kolovod.core.handles import Handle
from kolovod.errors import WaitTimeoutError
from kolovod.private_apis.torch import (
    NO_BACKWARD,
    current_backward,
    current_node,
    when_backward_ends,
)

__all__ = ["Watcher", "Work", "is_in_backward", "waiting"]

_UNSET = timedelta(0)  # c10d's "no timeout given": the group's
_PATIENCE_S = 1.0  # until the watcher takes futures that a backward was to wait for


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass: it exchanges gradients there."""
    return current_backward() != NO_BACKWARD


def waiting(*, for_gradients: bool) -> AbstractContextManager[None]:
    """Return a context for a wait, which is a span in timelines if it is for gradients."""
    if for_gradients and spans.log.on:
        return spans.span(spans.WAIT_FOR_GRADIENTS)
    return contextlib.nullcontext()


class Work(dist.Work):
    """One collective; may be waited for any number of times, by any thread."""

    _is_message = False

    def __init__(
        self,
        handle: Handle[Any],
        outputs: list[torch.Tensor],
        timeout_s: float,
        watcher: Watcher,
        order: Order,
        stream: Any = None,
    ) -> None:
        """``outputs``: the tensors that hold the results. ``timeout_s``: the group's limit.

        ``stream``: of a GPU, on which the results are put there; None: they are in host memory.
        """
        super().__init__()
        self._handle = handle
        self._outputs = outputs
        self._timeout_s = timeout_s
        self._watcher = watcher
        self._order = order
        self._stream = stream
        self._is_of_gradients = is_in_backward()
        self._has_landed = self._done = False
        self._error: Exception | None = None
        self._future: _Future | None = None
        self._lock = threading.RLock()

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Wait until the outputs hold the results; a ``timeout`` of zero means the group's limit.

        Raises what ``Handle.wait`` raises, on every call. After WaitTimeoutError the operation may
        be waited for again, except when it was the group's limit that is over.
        """
        if not self._done:
            with waiting(for_gradients=self._is_of_gradients):
                self._finish(timeout.total_seconds() if timeout > _UNSET else None)
        if self._error is not None:
            raise self._error
        staging.following(self._stream)
        return True

    def _finish(self, limit_s: float | None) -> None:
        self._land(limit_s)
        self._done = True
        if self._future is not None:
            self._future.settle()

    def _land(self, limit_s: float | None = None) -> None:
        """Put the results in their places. What follows a future of it comes in its own time."""
        if self._stream is not None and not self._is_message:
            self._order.land_before(self)
        with self._lock:
            if self._has_landed:
                return
            try:
                self._handle._drive(self._timeout_s if limit_s is None else limit_s)
            except WaitTimeoutError as error:
                if limit_s is not None:
                    raise
                self._error = _final(error, self._timeout_s)
            except Exception as error:  # of any kind, where the results are put in their places
                self._error = error
            self._has_landed = True
            self._order.done(self)

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return, or raise, at once."""
        if not self._done and self._handle.poll():
            self._finish(None)
        return self._done

    def is_success(self) -> bool:
        """Return whether it is completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return why it failed; None if it did not, or is pending."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The outputs, once completed."""
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        """Wait, as ``wait`` does."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of outputs."""
        with self._lock:
            future = self._future
            if future is None:
                future = self._future = _Future(self)
                if not self._done:
                    _find_driver(self)
        if self._done:
            future.settle()
        return future


def _final(error: WaitTimeoutError, limit_s: float) -> WaitTimeoutError:
    """Return ``error`` in the words that scripts look for, which other backends use."""
    late = str(error).partition(";")[0]
    return WaitTimeoutError(
        f"{late}. Timed out waiting {limit_s * 1000:.0f}ms, the timeout of the process group or of "
        "this call; it cannot be waited for again"
    )


def _devices(tensors: Sequence[torch.Tensor]) -> list[int | str | torch.device]:
    """The GPUs that they are on: PyTorch has who waits for a future come after its streams."""
    return list(dict.fromkeys(each.device for each in tensors if each.device.type != "cpu"))


class _Future(torch.futures.Future[Any]):
    """Completed with its work. Waiting for it, or for what ``then`` makes of it, drives."""

    def __init__(self, work: Work) -> None:
        super().__init__(devices=_devices(work._outputs))
        self._work = work
        self._unsettled = [True]

    def settle(self) -> None:
        """Complete the future: the work is done."""
        try:
            self._unsettled.pop()  # one thread only
        except IndexError:
            return
        if self._work._error is None:
            with staging.on(self._work._stream):
                self.set_result(self._work._outputs)
        else:
            self.set_exception(self._work._error)

    def wait(self) -> Any:
        if not self._work._done:
            with contextlib.suppress(Exception):  # which the future holds as well
                self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        following = _Future(self._work)

        def run(completed: torch.futures.Future[Any]) -> None:
            try:
                result = callback(completed)
            except Exception as error:
                following.set_exception(error)
            else:
                following.set_result(result)

        self.add_done_callback(run)
        return following


_in_backward: dict[int, list[Work]] = {}  # by autograd's number of the running backward


def _find_driver(work: Work) -> None:
    """Find who drives ``work``, as the module's text says: a callback, or the watcher."""
    backward = current_backward()
    if backward == NO_BACKWARD or current_node() is None:  # no node: in a callback at the end
        work._watcher.take(work, at_once=True)
        return
    works = _in_backward.get(backward)
    if works is None:
        works = _in_backward[backward] = []
        when_backward_ends(lambda: _end_of(backward))
    works.append(work)
    work._watcher.take(work, at_once=False)


def _end_of(backward: int) -> None:
    for work in _in_backward.pop(backward):
        work.wait()


class Watcher:
    """A thread that waits for what nobody else can be relied on to wait for.

    There is one for each group, so that a group that waits for its peers holds up no other.
    """

    def __init__(self) -> None:
        """The thread starts with the first work."""
        self._works: list[tuple[float, Work, bool]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def take(self, work: Work, *, at_once: bool, finishes: bool = True) -> None:
        """Wait for ``work``: now, or when nobody else has done so before long.

        ``finishes``: False where it is enough that its results are there.
        """
        due = time.monotonic() + (0.0 if at_once else _PATIENCE_S)
        with self._changed:
            is_idle = not self._works
            self._works.append((due, work, finishes))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kolovod-watcher", daemon=True
                )
                self._thread.start()
            elif is_idle or at_once:
                self._changed.notify()

    def _run(self) -> None:
        while (wait := self._next()) is not None:
            with contextlib.suppress(Exception):  # which the work's future holds as well
                wait()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._stopping:
                self._works = [each for each in self._works if not _is_over(*each[1:])]
                now = time.monotonic()
                for due, work, finishes in self._works:
                    if due <= now:
                        return work.wait if finishes else work._land
                self._changed.wait(min((due - now for due, _, _ in self._works), default=None))
        return None

    def stop(self) -> None:
        """End the thread, once the group's engine is shut down, so that nothing is pending."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


def _is_over(work: Work, finishes: bool) -> bool:
    return work._done if finishes else work._has_landed

"""A log of the ranks for the callbacks of the executor's ``run``, which the driver calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.util.queue import Empty, Queue

__all__ = ["configure", "log"]

_LOOK_S = 0.1
_MOST_AT_ONCE = 1000

_queue: Any = None


def configure(queue: Any) -> None:
    """Put what is logged in this process there from now on. None: nowhere."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Give ``info_dict`` to the callbacks, if there are any; on any rank."""
    if _queue is not None:
        _queue.put(info_dict)


@contextlib.contextmanager
def passing_on(callbacks: Sequence[Callable[[Any], Any]] | None) -> Iterator[Any]:
    """A queue for ``configure``, of which each value is given to each of ``callbacks``.

    None where there are no callbacks. Leaving waits until all that is there was given to them, and
    raises what a callback has raised.
    """
    if not callbacks:
        yield None
        return
    queue = Queue(actor_options={"num_cpus": 0})
    is_over = threading.Event()
    failures: list[Exception] = []

    def serve() -> None:
        try:
            while True:
                ends = is_over.is_set()
                count = min(queue.qsize(), _MOST_AT_ONCE)
                with contextlib.suppress(Empty):
                    for value in queue.get_nowait_batch(count) if count else ():
                        for callback in callbacks:
                            callback(value)
                if not count:
                    if ends:
                        return
                    is_over.wait(_LOOK_S)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=serve, name="horovod.ray callbacks", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        is_over.set()
        thread.join()
        queue.shutdown(force=True)
    if failures:
        raise failures[0]

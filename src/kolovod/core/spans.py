"""Stretches of time in the training script that a timeline shows: backward, waiting, the step."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "CHOSEN",
    "OPTIMIZER_STEP",
    "WAIT",
    "WAIT_FOR_GRADIENTS",
    "Cpu",
    "Span",
    "SpanLog",
    "SpanReader",
    "chosen",
    "log",
    "shown",
    "span",
]

P = ParamSpec("P")
R = TypeVar("R")

Cpu = tuple[int, ...]
"""The processor time of the thread, and of the whole process, at the start and at the end: thread,
thread, process, process (ns of CLOCK_THREAD_CPUTIME_ID and CLOCK_PROCESS_CPUTIME_ID); () where
nobody looked."""

Span = tuple[str, str, int, int, Cpu]
"""Name, name of the thread, start and end (ns of CLOCK_MONOTONIC), processor time."""

WAIT = "wait"
WAIT_FOR_GRADIENTS = "wait for gradients"
OPTIMIZER_STEP = "optimizer step"
CHOSEN = "chosen: "
"""The beginning of the name of a choice, which takes no time."""
_NAME_CHARACTERS, _THREAD_CHARACTERS = 100, 40
_MOST = 100_000  # kept while nobody takes them; then the oldest go


class SpanLog:
    """The spans of this process, for those who read them. Any thread adds."""

    def __init__(self) -> None:
        self.on = False
        """True: somebody reads them; else nothing is kept."""
        self._lock = threading.Lock()
        self._readers: tuple[SpanReader, ...] = ()
        self._hooks: list[Callable[[], None]] = []

    def when_read(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` once, before anybody reads: what only readers need begins then."""
        with self._lock:
            self._hooks.append(hook)
        if self.on:
            self._call_hooks()

    def _call_hooks(self) -> None:
        with self._lock:
            hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()

    def add(self, name: str, start_ns: int, end_ns: int, cpu: Cpu = ()) -> None:
        """Keep a span of this thread."""
        thread = threading.current_thread().name[:_THREAD_CHARACTERS]
        span = (name[:_NAME_CHARACTERS], thread, start_ns, end_ns, cpu)
        for reader in self._readers:
            reader._spans.append(span)

    def waited(self, start_ns: int) -> None:
        """Keep that this thread has waited for an operation from then until now."""
        self.add(WAIT, start_ns, time.monotonic_ns())

    def open(self) -> SpanReader:
        """Return a reader, which gets all spans from now on."""
        self._call_hooks()
        reader = SpanReader(self)
        with self._lock:
            self._readers = (*self._readers, reader)
            self.on = True
        return reader

    def _close(self, reader: SpanReader) -> None:
        with self._lock:
            self._readers = tuple(other for other in self._readers if other is not reader)
            self.on = bool(self._readers)

    def forget(self) -> None:
        """Forget the readers in a forked child: they are threads of the parent."""
        self._lock, self._readers, self.on = threading.Lock(), (), False


class SpanReader:
    """The spans since they were last taken."""

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._spans: deque[Span] = deque(maxlen=_MOST)

    def close(self) -> None:
        """Get no more; what is there can still be taken."""
        self._log._close(self)

    def put_back(self, spans: list[Span]) -> None:
        """Put back the spans that were taken last: they could not be used."""
        self._spans.extendleft(reversed(spans))

    def take(self, most: int = _MOST) -> list[Span]:
        """The oldest, ``most`` at most, which are forgotten here."""
        return [self._spans.popleft() for _ in range(min(most, len(self._spans)))]


log = SpanLog()


class span:  # used like a function
    """Show what is done within ``with span("forward"):`` in the timeline, if one is recorded.

    Costs half a microsecond otherwise. Spans may be nested.
    """

    __slots__ = ("_cpu", "_name", "_start_ns")

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_ns = 0
        self._cpu = (0, 0)

    def __enter__(self) -> None:
        self._start_ns = 0
        if log.on:
            self._cpu = (time.thread_time_ns(), time.process_time_ns())
            self._start_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        if self._start_ns and log.on:
            end_ns = time.monotonic_ns()
            thread_ns, process_ns = self._cpu
            cpu = (thread_ns, time.thread_time_ns(), process_ns, time.process_time_ns())
            log.add(self._name, self._start_ns, end_ns, cpu)


def chosen(what: str) -> None:
    """Show that ``what`` was chosen now, and why, in the timeline, if one is recorded."""
    if log.on:
        now_ns = time.monotonic_ns()
        log.add(CHOSEN + what, now_ns, now_ns)


def shown(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for functions that are a span whenever they are called."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return wrapper

    return decorate

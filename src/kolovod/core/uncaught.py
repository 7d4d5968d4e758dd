"""Tell the other ranks of an exception that nobody catches and that ends this rank.

From ``init`` to ``shutdown`` the hooks of ``sys`` and ``threading`` for such exceptions are ours,
and call those that they found. A hook is called before the interpreter waits for its threads, of
which one may be waiting for the other ranks. If a hook of the user's replaces ours without calling
it, nothing is lost: then the exception that the interpreter remembers is looked at when it ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kolovod import _native, blame
from kolovod.errors import CollectiveAbortedError, LateRankError
from kolovod.net import messages
from kolovod.notices import report_to_stderr

__all__ = ["Watch", "bound_end", "first_line", "let_threads_out"]

_MOST_CHARS = 300
_MOST_BYTES = 500  # what the engine can pass on is longer, but has more to say
_MOST_LINKS = 16  # of a chain of exceptions
_PATIENCE_S = 0.5
_OUT_OF_ENGINE_S = 1.0


def first_line(error: BaseException) -> str:
    """``error`` in one line that can be printed anywhere, for example "ValueError: loss is nan"."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        said = str(error)[: 10 * _MOST_CHARS].strip().splitlines()
    except Exception:  # of its own __str__
        said = []
    line = f"{name}: {said[0].strip()}" if said else name
    if len(line) > _MOST_CHARS:
        line = f"{line[:_MOST_CHARS]}..."
    printable = messages.printable(line, _MOST_BYTES)
    return printable.encode()[:_MOST_BYTES].decode(errors="ignore")


class Watch:
    """Watches one rank of one world for exceptions that nobody catches.

    ``abort(text)`` ends the world for all.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        """Put the hooks in place. Without the thread that calls this nothing is to go on."""
        self._abort: Callable[[str], None] | None = abort  # until the end: it holds an engine
        self._thread = threading.current_thread()
        self._before = getattr(sys, "last_value", None)
        self._lost_thread = ""
        self._is_on = True
        self._told = False
        self._hooks: tuple[Any, Any] = self._make_hooks()
        sys.excepthook, threading.excepthook = self._hooks

    def end(self) -> None:
        """Put the former hooks back; where others came after ours, ours do nothing any more."""
        self._is_on = False
        if sys.excepthook is self._hooks[0]:
            sys.excepthook = self._former[0]
        if threading.excepthook is self._hooks[1]:
            threading.excepthook = self._former[1]
        self._abort, self._hooks = None, (None, None)

    def tell(self, error: BaseException) -> None:
        """End the world: ``error`` ends this rank. Never raises."""
        if self._told or not self._is_on:
            return
        self._told = True
        with contextlib.suppress(Exception):  # what str(error) may raise
            _note_cause(error)
        self._tell(first_line(error))

    def tell_at_exit(self, pending: int) -> None:
        """End the world at the interpreter's end, if an exception has led to that.

        ``pending``: the number of operations that were submitted and are not complete.
        """
        error = getattr(sys, "last_value", None)  # set for an exception that nobody caught
        is_ours = sys.excepthook is self._hooks[0]  # and has told it
        if error is not None and error is not self._before and not is_ours:
            if not _is_interactive():
                self.tell(error)
        elif self._lost_thread and pending > 0 and not self._told:
            self._tell(self._lost_thread)

    def _tell(self, text: str) -> None:
        abort = self._abort
        with contextlib.suppress(_native.EngineError):  # of a forked child
            if abort is not None:
                abort(text)

    def _make_hooks(self) -> tuple[Any, Any]:
        former = self._former = sys.excepthook, threading.excepthook

        def of_main(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if self._is_on and not _is_interactive():
                self._tell_after(error, lambda: former[0](kind, error, trace))
            else:
                former[0](kind, error, trace)

        def of_thread(arguments: threading.ExceptHookArgs, /) -> None:
            error = arguments.exc_value
            if not self._is_on or error is None or isinstance(error, SystemExit):
                former[1](arguments)
            elif arguments.thread is self._thread:
                self._tell_after(error, lambda: former[1](arguments))
            else:
                name = "" if arguments.thread is None else f" '{arguments.thread.name}'"
                self._lost_thread = first_line(error) + f" in its thread{name}"
                former[1](arguments)

        return of_main, of_thread

    def _tell_after(self, error: BaseException, show: Callable[[], object]) -> None:
        """Show the traceback, but not for long, then tell: others may have this process ended."""
        timer = threading.Timer(_PATIENCE_S, self.tell, [error])
        timer.daemon = True
        try:
            timer.start()
        except (RuntimeError, MemoryError):  # no thread is to be had
            self.tell(error)
        try:
            show()
        finally:
            timer.cancel()
            self.tell(error)


def bound_end(limit_s: float) -> None:
    """From now on an exception that nobody catches ends the process within ``limit_s``.

    It may have a thread that waits for the other ranks, which go on without it.
    """
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _is_interactive():
            timer = threading.Timer(limit_s, _end_now, [limit_s])
            timer.daemon = True
            timer.start()
        former(kind, error, trace)

    sys.excepthook = hook


def _end_now(late_s: float) -> None:
    main = threading.main_thread()
    threads = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    left = f"its threads {', '.join(threads)} run still" if threads else "it runs still"
    report_to_stderr(f"an exception has ended this script {late_s:g} s ago, but {left}: killed")
    os._exit(1)


def let_threads_out() -> None:
    """At the interpreter's end, when the world is gone: wait until no thread is in an operation.

    A thread that comes back from one when the interpreter is gone takes the process down with it.
    """
    deadline = time.monotonic() + _OUT_OF_ENGINE_S
    while _native.calls_under_way() and time.monotonic() < deadline:
        time.sleep(0.001)


os.register_at_fork(after_in_child=_native.forget_calls)


def _note_cause(error: BaseException) -> None:
    """Tell the launcher whose failure ``error`` comes from; nobody's: it is this rank's own."""
    blame.note(None)
    link: BaseException | None = error
    for _ in range(_MOST_LINKS):
        if link is None or isinstance(link, LateRankError):
            return
        rank = link.rank if isinstance(link, CollectiveAbortedError) else None
        if rank is None:  # an op in a graph fails with its framework's error
            rank = blame.named_in(str(link))
        if rank is not None:
            blame.note_member(rank)
            return
        link = link.__cause__ or link.__context__


def _is_interactive() -> bool:
    """Return whether the interpreter goes on after an exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)

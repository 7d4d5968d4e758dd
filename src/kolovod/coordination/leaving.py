"""Signals that tell a process of an elastic job to leave."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["LEAVING", "leaving_by_signals"]

LEAVING = (signal.SIGTERM, signal.SIGUSR1)
"""What tells a process to leave: SIGUSR1 is what Slurm is asked to send before a time limit."""
_FOLLOWS = signal.SIGHUP
"""systemd sends it with SIGTERM to all processes of a login that ends."""

_handlers: dict[signal.Signals, Callable[[int, Any], Any]] = {}
_do_nothing: Callable[[int, Any], Any] = operator.is_
"""A function in C: a signal cannot interrupt it, as it can a function of Python."""
_forking = threading.local()  # .mask: the signals that the thread blocks otherwise


@contextlib.contextmanager
def leaving_by_signals(leave: Callable[[], None]) -> Iterator[None]:
    """Have the signals of ``LEAVING`` call ``leave`` within this context.

    Those that the script handles already, or ignores, stay as they are; so do all in other threads.
    A handler that the script installs meanwhile stays, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: Any) -> None:
        # Python calls it within itself where the signal comes again meanwhile, as one does that
        # several send: without end if they are fast. It is called once.
        if signal.getsignal(number) is hear:
            _handlers[signal.Signals(number)] = _do_nothing
            signal.signal(number, _do_nothing)
        leave()
        _hear(_FOLLOWS, _do_nothing)

    for number in LEAVING:
        _hear(number, hear)
    try:
        yield
    finally:
        for number, handler in list(_handlers.items()):
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
        _handlers.clear()


def _hear(number: signal.Signals, handler: Callable[[int, Any], Any]) -> None:
    if signal.getsignal(number) is signal.SIG_DFL:
        _handlers[number] = handler
        signal.signal(number, handler)


def _before_fork() -> None:
    """Block the signals: a child that is sent one before its handler is gone would forget it."""
    if _handlers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(_handlers))


def _after_fork() -> None:
    mask = vars(_forking).pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Let the signals end a child as always."""
    for number, handler in _handlers.items():
        if signal.getsignal(number) is handler:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, signal.SIG_DFL)
    _handlers.clear()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)

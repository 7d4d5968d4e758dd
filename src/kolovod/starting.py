"""Ctrl-C while a command of ours is being loaded: it ends by the signal at once, and says nothing.

Python would print where among its imports it was. The packages import this before all else, and
what runs a command calls ``end`` when it can answer a signal itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys

__all__ = ["end"]

_COMMANDS = ("kolovod", "horovodrun")


def _begin() -> None:
    """Leave Ctrl-C to the system, if this process is one of our commands."""
    is_script = os.path.basename(next(iter(getattr(sys, "argv", [])), "")) in _COMMANDS
    is_module = ("-m", "kolovod") in itertools.pairwise(sys.orig_argv)
    if (is_script or is_module) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread: no command's start
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def end() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, if that was changed."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()

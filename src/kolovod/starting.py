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
    script = next(iter(getattr(sys, "argv", [])), "")  # "-m" while the package of -m is loaded
    is_module = script == "-m" and ("-m", "kolovod") in itertools.pairwise(sys.orig_argv)
    is_command = is_module or os.path.basename(script) in _COMMANDS
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread: no command's start
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def end() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, if that was changed."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()

"""A reader of what faulthandler writes of a process. PURE."""

from __future__ import annotations

import re

__all__ = ["line_of", "main_first"]

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


_THREADS = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")


def main_first(stacks: str) -> str:
    """Put the main thread, which faulthandler writes last, before the others."""
    before, *threads = _THREADS.split(stacks.rstrip())
    return before + "\n\n".join(each.rstrip() for each in [*threads[-1:], *threads[:-1]])


def line_of(stacks: str) -> str:
    """Return the line that the main thread is at: ``train.py:12 in load``.

    It is in the script itself if that is known. faulthandler writes the newest frame of a thread
    first, and the main thread last.
    """
    threads = _THREADS.split(stacks)
    frames = [found for line in threads[-1].splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return ""
    own = next((f for f in frames if not any(part in f["file"] for part in _LIBRARIES)), None)
    frame = own if own is not None else frames[0]
    where = f"{frame['file']}:{frame['line']} in {frame['function']}"
    if own is not None and own is not frames[0]:
        where += f" (in {frames[0]['function']})"
    return where

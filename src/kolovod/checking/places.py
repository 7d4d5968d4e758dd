"""The line of the user's script that is being run."""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

from kolovod.core.call_lines import is_of_script, script_frame

__all__ = ["line_of_error", "modules_above", "named_line", "script_line"]


def script_line(frame: FrameType | None = None) -> str:
    """Return the script's line, for example "train.py:12"; "" if no frame is of the script."""
    found = script_frame(sys._getframe(1) if frame is None else frame)
    return "" if found is None else named_line(found.f_code.co_filename, found.f_lineno)


def line_of_error(trace: TracebackType | None) -> str:
    """Return the innermost line of the script in a traceback."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_of_script(file):
            found = named_line(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def modules_above(frame: FrameType | None) -> list[str]:
    """Return the modules of the frames from ``frame`` outwards, up to the script's first."""
    found = []
    while frame is not None and not is_of_script(frame.f_code.co_filename):
        found.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return found


def named_line(file: str, line: int) -> str:
    """Return a place as the user would write it: relative to where the command was started."""
    try:
        short = os.path.relpath(file)
    except (OSError, ValueError):
        short = file
    return f"{file if short.startswith('..') else short}:{line}"

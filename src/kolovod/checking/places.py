"""Which line of the user's script is being run."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import FrameType, TracebackType

__all__ = ["is_of_script", "line_of_error", "modules_above", "named_line", "script_line"]

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGES = (_OURS + os.sep, os.path.join(os.path.dirname(_OURS), "horovod") + os.sep)


@functools.lru_cache(maxsize=4096)
def is_of_script(file: str) -> bool:
    """Whether the file belongs to no library: to the script, or to a module beside it."""
    if file.startswith("<"):
        return file == "<string>"  # python -c
    path = os.path.realpath(file)
    if path.startswith(_PACKAGES) or f"{os.sep}site-packages{os.sep}" in path:
        return False
    return not path.startswith(_LIBRARIES)


def script_line(frame: FrameType | None = None) -> str:
    """For example "train.py:12"; "" where no frame is of the script."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if is_of_script(frame.f_code.co_filename):
            return named_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of_error(trace: TracebackType | None) -> str:
    """The innermost line of the script in a traceback."""
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_of_script(file):
            found = named_line(file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def modules_above(frame: FrameType | None) -> list[str]:
    """The modules of the frames from ``frame`` outwards, up to the script's first."""
    found = []
    while frame is not None and not is_of_script(frame.f_code.co_filename):
        found.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return found


def named_line(file: str, line: int) -> str:
    """A place as the user would write it: relative to where the command was started."""
    try:
        short = os.path.relpath(file)
    except (OSError, ValueError):
        short = file
    return f"{file if short.startswith('..') else short}:{line}"

"""Which lines of the user's script call operations without a name.

Such an operation is matched with the others' by its order alone, so a rank that makes one more or
one less than the others would combine its loss with their accuracy, and nobody would know.
Therefore it carries the lines that call it (csrc/bind/call_lines.h), and the engine refuses what
ranks call from different ones. Frames of libraries are left out: it matters from where the script
calls them, and ranks may reach the same line through more or fewer of them (a profiler). So are
those outside of an elastic job's own: a rank that joins gets the state where it starts, the others
give it to it where they commit.

In a function that a framework traces (a graph of TensorFlow, a program of JAX) an operation carries
the line of that function, and none outside of it: each rank traces where it comes to it first.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType

from kolovod import _native

__all__ = ["are_told", "is_of_script", "line_of", "script_frame", "traced_line", "turn"]

_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_paths().get(name))
)
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_PACKAGES = tuple(os.path.join(_FOLDER, name) + os.sep for name in ("kolovod", "horovod"))
_WITHOUT_FILE = ("<string>", "<stdin>", "<dynamic-code>")
"""The names that ``python -c``, ``python -`` and cloudpickle give to the script."""
_GENERATED = ("__autograph_generated_file", f"{os.sep}torchinductor_")
"""Parts of the paths of files that TensorFlow and PyTorch write for a process."""
_MOST_CHARACTERS = 80  # of a file's name; csrc/bind/call_lines.h has as many
_BORDER = 2  # see ``_kind_of``
_are_told = False
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=4096)
def is_of_script(file: str) -> bool:
    """Return whether the file belongs to no library: to the script, or to a module beside it."""
    if file.startswith("<"):
        return file in _WITHOUT_FILE
    path = os.path.realpath(file)
    if path.startswith(_PACKAGES) or any(part in path for part in _PACKAGE_FOLDERS + _GENERATED):
        return False
    return not path.startswith(_LIBRARIES)


def script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the script, from ``frame`` outwards."""
    while frame is not None and not is_of_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(file: str, number: int) -> str:
    """Return the line as an operation carries it, without folders: hosts may have other ones."""
    return f"{file.rpartition('/')[2][-_MOST_CHARACTERS:]}:{number}"


def traced_line(is_border: Callable[[str], bool]) -> str:
    """The innermost line of the script in the function that is being traced; "" if it has none.

    ``is_border``: whether a file is one of the framework's, which has called that function.
    """
    frame: FrameType | None = sys._getframe(1) if are_told() else None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_script(file):
            return line_of(file, frame.f_lineno)
        if is_border(file) or _kind_of(file) == _BORDER:
            break
        frame = frame.f_back
    return ""


def are_told() -> bool:
    """Return whether operations without a name carry their lines."""
    return _are_told


def _kind_of(file: str) -> int:
    """Return the kind of the file's frames: 0 a library's, 1 the script's, 2 beyond its lines."""
    if is_of_script(file):
        return 1
    path = os.path.realpath(file)
    is_elastic = path.startswith(_PACKAGES) and "elastic" in path[len(_FOLDER) :]
    return _BORDER if is_elastic else 0


def turn(on: bool) -> None:
    """Have operations carry their lines from now on, or not. The same on all ranks."""
    global _are_told
    _are_told = on
    _native.use_call_lines(_kind_of if on else None)

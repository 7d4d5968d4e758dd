"""Commands that cannot run: no such one, its Python lacks or hides modules, or has newer ones."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from kolovod import hiding
from kolovod.migrate.cures import cure_of

__all__ = ["advice", "not_found"]

_MOST_CHARS = 1 << 20
_BLAMED = re.compile(
    r"(?:module|from(?: partially initialized module)?) '(\w+)'|'(\w+)' is not a package"
)
"""What Python says of a module that lacks what others want of it."""


def not_found(command: Sequence[str]) -> str:
    """Return what is wrong, and what to do, if no program has that name here; else ""."""
    if shutil.which(command[0]) is not None:
        return ""
    if Path(command[0]).suffix == ".py" and Path(command[0]).is_file():
        return f"{command[0]} is no program: give python {shlex.join(command)}"
    return f"command not found: {command[0]}"


def advice(command: Sequence[str], said: str) -> str:
    """Return advice if ``said``, the end of a rank's stderr, tells a usual mistake; else "".

    Such mistakes are: a rank's Python has no Kolovod; a file of the script's folder has the name of
    a module of Python's own, or of an installed package; a script with Horovod was written for
    earlier releases of its framework. ``command``: the command line by which the rank was started.
    """
    for blamed in _BLAMED.finditer(said):
        name = blamed[1] or blamed[2]
        if file := _hiding_file(command, name):
            return hiding.text_of(file, name)
    found = re.search(r"No module named '(kolovod|horovod)'", said)
    if found is None:
        return cure_of(said) if "horovod" in _text_of_script(command) else ""
    path = shutil.which(command[0]) or command[0]
    return (
        f"{path} has no module {found[1]}; this launcher is that of {sys.executable}: start the "
        f"script by {sys.executable}, or install kolovod in the environment of {path}"
    )


def _hiding_file(command: Sequence[str], name: str) -> str:
    """Return the file beside the script that hides the module ``name``; "" if none does.

    It may be a package, too.
    """
    script = _script_of(command)
    beside = Path(script).absolute().parent / f"{name}.py"
    is_hiding = bool(script) and beside.is_file() and _is_elsewhere(name, beside)
    return str(beside) if is_hiding else ""


def _is_elsewhere(name: str, file: Path) -> bool:
    """Return whether this Python at least has another module of that name than ``file``."""
    if name in sys.stdlib_module_names:
        return True
    folders = [each for each in sys.path if Path(each).absolute() != file.parent]
    return PathFinder.find_spec(name, folders) is not None


def _script_of(command: Sequence[str]) -> str:
    return next((word for word in command[1:] if word.endswith(".py")), "")


def _text_of_script(command: Sequence[str]) -> str:
    try:
        with open(_script_of(command), encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARS)
    except OSError:
        return ""

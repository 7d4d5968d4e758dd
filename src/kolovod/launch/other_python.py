"""Commands that cannot run: no such one, its Python lacks or hides modules, or has newer ones."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kolovod import hiding
from kolovod.migrate.cures import cure_of

__all__ = ["advice", "not_found"]

_MOST_CHARS = 1 << 20


def not_found(command: Sequence[str]) -> str:
    """What is wrong, and what to do, if there is no program of that name here; else ""."""
    if shutil.which(command[0]) is not None:
        return ""
    if Path(command[0]).suffix == ".py" and Path(command[0]).is_file():
        return f"{command[0]} is no program: give python {shlex.join(command)}"
    return f"command not found: {command[0]}"


def advice(command: Sequence[str], said: str) -> str:
    """What to do about ``said``, the end of a rank's stderr, if it tells a usual mistake; else "".

    That a rank's Python has no Kolovod; that a file of the script's folder has the name of a module
    of Python's own; that a script with Horovod was written for earlier releases of its framework.
    ``command``: what the rank was started by.
    """
    hidden = re.search(r"(?:module|from(?: partially initialized module)?) '(\w+)'", said)
    if hidden is not None and (file := _hiding_file(command, hidden[1])):
        return hiding.text_of(file, hidden[1])
    found = re.search(r"No module named '(kolovod|horovod)'", said)
    if found is None:
        return cure_of(said) if "horovod" in _text_of_script(command) else ""
    path = shutil.which(command[0]) or command[0]
    return (
        f"{path} has no module {found[1]}; this launcher is that of {sys.executable}: start the "
        f"script by {sys.executable}, or install kolovod in the environment of {path}"
    )


def _hiding_file(command: Sequence[str], name: str) -> str:
    """The file beside the script that hides module ``name`` of Python's own; "" if none does."""
    script = _script_of(command)
    beside = Path(script).absolute().parent / f"{name}.py"
    is_hiding = bool(script) and name in sys.stdlib_module_names and beside.is_file()
    return str(beside) if is_hiding else ""


def _script_of(command: Sequence[str]) -> str:
    return next((word for word in command[1:] if word.endswith(".py")), "")


def _text_of_script(command: Sequence[str]) -> str:
    try:
        with open(_script_of(command), encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARS)
    except OSError:
        return ""

"""Commands that cannot run: there is no such one, or its Python lacks the package."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["advice", "not_found"]


def not_found(command: Sequence[str]) -> str:
    """What is wrong, and what to do, if there is no program of that name here; else ""."""
    if shutil.which(command[0]) is not None:
        return ""
    if Path(command[0]).suffix == ".py" and Path(command[0]).is_file():
        return f"{command[0]} is no program: give python {shlex.join(command)}"
    return f"command not found: {command[0]}"


def advice(command: Sequence[str], said: str) -> str:
    """What to do if ``said``, the end of a rank's stderr, tells that it has no Kolovod; else "".

    ``command``: what the rank was started by.
    """
    found = re.search(r"No module named '(kolovod|horovod)'", said)
    if found is None:
        return ""
    path = shutil.which(command[0]) or command[0]
    return (
        f"{path} has no module {found[1]}; this launcher is that of {sys.executable}: start the "
        f"script by {sys.executable}, or install kolovod in the environment of {path}"
    )

"""What to do where a script's Python is another than the launcher's, and lacks the package."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

__all__ = ["advice"]


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

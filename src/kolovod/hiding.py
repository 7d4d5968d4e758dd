"""Files beside the script that hide modules of Python's own.

A ``queue.py`` in the script's folder is what ``import queue`` finds everywhere, in libraries, too;
what breaks then is far from the cause.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["explained", "hidden_module", "text_of"]


def hidden_module() -> str:
    """Return a warning of a loaded file beside the script that hides a module; "" for none."""
    folder = os.path.abspath(sys.path[0]) if sys.path else ""
    for name in sorted(sys.stdlib_module_names):
        file = getattr(sys.modules.get(name), "__file__", None)
        if not file:
            continue
        file = os.path.abspath(file)
        place = os.path.dirname(file)
        if folder in (place, os.path.dirname(place)) and name in (
            os.path.basename(place),
            os.path.splitext(os.path.basename(file))[0],
        ):
            return text_of(file, name)
    return ""


def text_of(file: str, name: str) -> str:
    """The error about ``file``."""
    what = "Python's own module" if name in sys.stdlib_module_names else "the package"
    return f"{file} hides {what} '{name}', which libraries import: give the file another name"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Within this context an error about a module's contents names the file that hides it.

    Raises ImportError, from that error.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        text = hidden_module()
        if not text:
            raise
        raise ImportError(text) from error

"""Horovod's names, on Kolovod's engine: scripts written for Horovod run as they are.

Aliases, and the quirks that scripts rely on, each with its reason; whatever computes is in
``kolovod``. Where Horovod is wrong or short, docs/differences-from-horovod.md says what happens
instead.
"""

from __future__ import annotations

from kolovod import starting as _starting  # noqa: F401

# isort: split
from importlib import metadata as _metadata
from typing import Any as _Any

__version__ = "0.28.1"
"""The release of Horovod whose interface this is; scripts compare it."""


def _refuse_the_real_one() -> None:
    """Raise ImportError beside Horovod itself: each overwrites the other's files."""
    try:
        found = _metadata.version("horovod")
    except _metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"Horovod {found} is installed beside Kolovod, which brings a package named horovod too: "
        "pip uninstall horovod, then pip install --force-reinstall kolovod"
    )


_refuse_the_real_one()


def __getattr__(name: str) -> _Any:
    """``horovod.run``, which is imported when it is asked for: ranks need no launcher."""
    if name == "run":
        from horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")

"""Startup code that Python runs before the script in the ranks of ``kolovod check``.

Python finds it by its name. It imports nothing but the standard library, so that the script still
decides what is imported first; Kolovod's watchers come with the modules that they watch.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import sys
from typing import Any

_WATCHED = frozenset(
    {
        "kolovod.core.submission",
        "kolovod.jax.diloco",
        "kolovod.jax.periodic",
        "kolovod.tensorflow.exchange",
        "kolovod.torch.adasum",
        "kolovod.torch.distributed",
        "kolovod.torch.periodic",
        "kolovod.torch.sharded",
        "equinox",
        "flax.linen.normalization",
        "flax.nnx.nn.normalization",
        "h5py",
        "jax",
        "keras",
        "optax",
        "safetensors.torch",
        "tensorflow",
        "tf_keras",
        "torch",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.distributed.algorithms.model_averaging.averagers",
    }
)
_MOST_FILES, _MOST_FRAMES = 10_000, 40
_HERE = os.path.dirname(os.path.abspath(__file__))
_importing: set[str] = set()
_opened: list[tuple[str, bool, list[tuple[str, int]]]] = []
"""Path, whether it was only appended to, and the files and lines of the stack, innermost first."""


class _Finder:
    """Tells the watchers when a module that they watch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED or name in _importing:
            return None
        _importing.add(name)
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        finally:
            _importing.discard(name)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if spec is None or execute is None:
            return spec

        def execute_and_tell(module: Any) -> None:
            execute(module)
            _tell("imported", name)

        spec.loader.exec_module = execute_and_tell  # type: ignore[union-attr,method-assign]
        return spec


def _tell(event: str, *arguments: Any) -> None:
    # No Kolovod, or another one, is in this Python: the script goes on, and nothing is seen of it.
    with contextlib.suppress(Exception):
        getattr(importlib.import_module("kolovod.checking.watching"), event)(_opened, *arguments)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if not isinstance(path, str | bytes) or len(_opened) >= _MOST_FILES:
            return
        flags = flags if isinstance(flags, int) else 0
        if not flags & (os.O_WRONLY | os.O_RDWR):
            return
        appends = bool(flags & os.O_APPEND)
    elif event == "os.rename":
        path, appends = arguments[1], False
    else:
        return
    with contextlib.suppress(Exception):  # a path that is none: the call itself says so
        _opened.append((os.path.realpath(os.fsdecode(path)), appends, _stack()))


def _stack() -> list[tuple[str, int]]:
    frame: Any = sys._getframe(2)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _run_hidden() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    for folder in sys.path:
        if os.path.abspath(folder or ".") == _HERE:
            continue
        file = os.path.join(folder, "sitecustomize.py")
        if os.path.isfile(file):
            spec = importlib.util.spec_from_file_location("sitecustomize", file)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


def _begin() -> None:
    faulthandler.enable()
    sys.meta_path.insert(0, _Finder())
    sys.addaudithook(_audit)
    atexit.register(_tell, "script_ends")  # called last, since it was registered first


if os.environ.get("KOLOVOD_CHECK"):
    _begin()
_run_hidden()

"""The functions that ``startup/sitecustomize.py`` calls.

Each watcher begins when what it watches has been imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from kolovod.checking.places import script_line
from kolovod.checking.recorder import Opened, Recorder, the_recorder

__all__ = ["imported", "script_ends"]

_FRAMEWORKS = ("torch", "tensorflow", "keras", "tf_keras", "jax")
_WATCHERS = {
    "kolovod.core.submission": "watch_run",
    "torch": "watch_torch",
    "kolovod.torch.adasum": "watch_torch",
    "kolovod.torch.distributed": "watch_torch",
    "kolovod.torch.periodic": "watch_torch",
    "kolovod.torch.sharded": "watch_torch",
    "kolovod.tensorflow.exchange": "watch_tensorflow",
    "jax": "watch_jax",
    "optax": "watch_jax",
    "equinox": "watch_jax",
    "flax.linen.normalization": "watch_flax",
    "flax.nnx.nn.normalization": "watch_flax",
    "kolovod.jax.diloco": "watch_jax",
    "kolovod.jax.periodic": "watch_jax",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": "watch_local_sgd",
    "torch.distributed.algorithms.model_averaging.averagers": "watch_local_sgd",
    "keras": "watch_keras",
    "tf_keras": "watch_keras",
}


def imported(opened: Opened, name: str) -> None:
    """The module ``name`` has been imported."""
    recorder = the_recorder()
    recorder.use_files(opened)
    if name in _FRAMEWORKS:
        recorder.facts.frameworks.append(name)
    try:
        _watch(name, recorder)
    except Exception as error:  # of a version that has other names: the script goes on
        recorder.facts.trouble = f"{name} cannot be watched: {type(error).__name__}: {error}"


def _watch(name: str, recorder: Recorder) -> None:
    if name in _WATCHERS:
        watcher = importlib.import_module(f"kolovod.checking.{_WATCHERS[name]}")
        watcher.imported(name, recorder)
    elif name == "safetensors.torch":
        module = sys.modules[name]
        module.save_file = _noting(module.save_file, 1)  # type: ignore[attr-defined]
    elif name == "h5py":
        _watch_h5py(sys.modules[name])


def script_ends(opened: Opened) -> None:
    """The interpreter is about to end."""
    recorder = the_recorder()
    recorder.use_files(opened)
    if os.getpid() == recorder.facts.pid:
        recorder.script_ends()


def _noting(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wrap ``function``, whose argument at ``position`` is the file that it writes."""

    def noting(*arguments: Any, **named: Any) -> Any:
        path = arguments[position] if len(arguments) > position else named.get("filename")
        the_recorder().note_file(path, script_line())
        return function(*arguments, **named)

    return noting


def _watch_h5py(h5py: Any) -> None:
    """Note h5py's files, which its library opens itself, where Python does not see it."""
    open_file = h5py.File.__init__

    def opening(self: Any, name: Any, mode: str = "r", *arguments: Any, **named: Any) -> None:
        if mode != "r" and named.get("driver") != "core":
            with contextlib.suppress(TypeError):
                the_recorder().note_file(name, script_line())
        open_file(self, name, mode, *arguments, **named)

    h5py.File.__init__ = opening

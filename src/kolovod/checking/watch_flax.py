"""Watches Flax's batch normalization: the running statistics that training begins each step with.

A script that averages them over ranks after each step begins the next with equal ones, one that
does not begins with those of its own data.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from kolovod.checking.recorder import Recorder
from kolovod.checking.watch_jax import Watcher, watcher_of

__all__ = ["imported"]

_COLLECTION = "batch_stats"


def imported(name: str, recorder: Recorder) -> None:
    """Watch ``name``: the module of normalization layers of ``flax.linen`` or of ``flax.nnx``."""
    watching = _of_linen if name.startswith("flax.linen") else _of_nnx
    kind: Any = sys.modules[name].BatchNorm
    kind.__call__ = watching(kind.__call__, watcher_of(recorder))


def _of_linen(normalize: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    @functools.wraps(normalize)
    def normalizing(layer: Any, *given: Any, **named: Any) -> Any:
        is_training = layer.is_mutable_collection(_COLLECTION) and not layer.is_initializing()
        if is_training and watcher.is_in_training() and layer.has_variable(_COLLECTION, "mean"):
            known = {each: layer.get_variable(_COLLECTION, each) for each in ("mean", "var")}
            for each, array in watcher.noting_statistics(".".join(layer.path), known).items():
                layer.put_variable(_COLLECTION, each, array)
        return normalize(layer, *given, **named)

    return normalizing


def _of_nnx(normalize: Callable[..., Any], watcher: Watcher) -> Callable[..., Any]:
    @functools.wraps(normalize)
    def normalizing(
        layer: Any, x: Any, use_running_average: Any = None, *given: Any, **named: Any
    ) -> Any:
        is_kept = layer.use_running_average if use_running_average is None else use_running_average
        if not is_kept and watcher.is_in_training() and layer.mean is not None:
            variables = {"mean": layer.mean, "var": layer.var}
            known = {each: _value(variable) for each, variable in variables.items()}
            for each, array in watcher.noting_statistics("", known).items():
                _set(variables[each], array)
        return normalize(layer, x, use_running_average, *given, **named)

    return normalizing


def _value(variable: Any) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


def _set(variable: Any, array: Any) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(array)
    else:
        variable.value = array

"""Horovod's functions on values, for both of its modules for Keras.

They return tensors of what Keras runs on; in a graph of TensorFlow 1, where a tensor would be none
yet, arrays, as a session does.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

import kolovod.keras as kv
from horovod.common.arguments import op_of
from horovod.common.basics import Average
from kolovod.keras import Compression
from kolovod.keras.framework_detection import backend_of, chosen
from kolovod.keras.functions import to_numpy


def reduced(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """Combine a value, as both modules' ``allreduce`` does.

    Raises ValueError for ``average`` and ``op`` together.
    """
    op = op_of(op, average)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options = {"name": name, "op": op, "compression": compression, **scales}
    verbs = _on_tensors()
    if verbs is not None:
        return verbs.allreduce(_tensor(value), **options)
    return _made(kv.allreduce(value, **options))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine ``value`` over all ranks; a tensor. ``average`` is deprecated, ``op`` says it."""
    return reduced(value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' values one after the other; a tensor."""
    verbs = _on_tensors()
    if verbs is not None:
        return verbs.allgather(_tensor(value), name)
    return _made(kv.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value; a tensor."""
    verbs = _on_tensors()
    if verbs is not None:
        return verbs.broadcast(_tensor(value), root_rank, name)
    return _made(kv.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Return this rank's rows of the combined value; a tensor."""
    verbs = _on_tensors()
    if verbs is not None:
        return verbs.reducescatter(_tensor(value), name=name, op=op)
    return _made(kv.reducescatter(value, name, op))


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: only graphs of TensorFlow 1 have a list of all variables."""
    raise RuntimeError(
        "there is no list of global variables without a graph of TensorFlow 1: use "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}), or "
        f"kolovod.keras.broadcast_model(model, {root_rank})"
    )


def _on_tensors() -> ModuleType | None:
    """The verbs on TensorFlow's tensors, if Keras runs on these and they have values."""
    if backend_of(chosen()) != "tensorflow":
        return None
    has_values = importlib.import_module("tensorflow").compat.v1.executing_eagerly_outside_functions
    return importlib.import_module("horovod.tensorflow") if has_values() else None


def _tensor(value: Any) -> Any:
    """TensorFlow's tensor of ``value``, of the dtype that TensorFlow gives plain numbers."""
    if hasattr(value, "detach"):  # PyTorch's
        value = to_numpy(value)
    return importlib.import_module("tensorflow").convert_to_tensor(value)


def _made(array: Any) -> Any:
    """A tensor of what Keras runs on."""
    keras = chosen()
    return array if backend_of(keras) == "tensorflow" else keras.ops.convert_to_tensor(array)

"""Horovod's functions on values, for both of its modules for Keras."""

from __future__ import annotations

from typing import Any, NoReturn

import kolovod.keras as kv
from horovod.common import basics
from horovod.common.basics import Average
from horovod.common.util import get_average_backwards_compatibility_fun
from kolovod.keras import Compression

_op_of = get_average_backwards_compatibility_fun(basics)


def reduced(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: int | None,
    compression: Any,
) -> Any:
    """What both modules' ``allreduce`` does. ValueError for ``average`` and ``op`` together."""
    op = _op_of(op, average)
    return kv.allreduce(value, name, op, prescale_factor, postscale_factor, compression)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Combine ``value`` over all ranks; an array. ``average`` is deprecated, ``op`` says it."""
    return reduced(value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' values one after the other; an array."""
    return kv.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value; an array."""
    return kv.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Of the combined value, the rows of this rank; an array."""
    return kv.reducescatter(value, name, op)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """For graphs of TensorFlow 1, which have a list of all variables. Raises RuntimeError."""
    raise RuntimeError(
        "there is no list of global variables without a graph of TensorFlow 1: use "
        f"hvd.callbacks.BroadcastGlobalVariablesCallback({root_rank}), or "
        f"kolovod.keras.broadcast_model(model, {root_rank})"
    )

"""Horovod's helpers for starting equal."""

from __future__ import annotations

from typing import Any

import mxnet as mx

import kolovod.mxnet as kv
from kolovod.errors import FrontEndArgumentError

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite ``params`` (a dict or a ParameterDict) with the root's.

    Those with deferred initialization when they are initialized. Raises ValueError for others.
    """
    if not isinstance(params, dict | mx.gluon.ParameterDict):
        raise FrontEndArgumentError(f"invalid params of type: {type(params)}")
    kv.broadcast_parameters(params, root_rank, prefix)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's ``obj``, on every rank."""
    return kv.broadcast_object(obj, root_rank, name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's ``obj``, in rank order."""
    return kv.allgather_object(obj, name)

"""Any Python object, between ranks, as cloudpickle's bytes.

The peers of a world have proved that they know its secret, so their pickles are as trustworthy as
the script itself. An object that cannot be pickled fails on every rank, not only where it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.submission import Group, WorldLike, position_of
from kolovod.errors import InvalidArgumentError

_HEADER = np.dtype([("failed", np.int64), ("bytes", np.int64)])


class Objects:
    """``broadcast_object`` and ``allgather_object`` over the verbs on NumPy arrays."""

    def __init__(self, world: Callable[[], WorldLike]) -> None:
        """``world`` is asked on every call, so that a new world needs no new Objects."""
        self._collectives = Collectives(NumpyFrontend(), world)

    def broadcast_object(
        self,
        obj: Any,
        root_rank: int = 0,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> Any:
        """Return, on every rank, a copy of the ``obj`` of ``root_rank``; there, ``obj`` itself.

        ``obj`` matters on ``root_rank`` only. Raises InvalidArgumentError, on every rank, when it
        cannot be pickled, and on one that cannot read it; and what broadcast raises.
        """
        verbs = self._collectives
        place = verbs.membership(process_set)
        root = position_of(root_rank, process_set)
        is_root = place.rank == root
        header = np.zeros(2, np.int64)
        payload = np.empty(0, np.uint8)
        if is_root:
            failed, payload = _dump(obj)
            header[:] = failed, payload.size
        verbs.broadcast_(header, root_rank, name and f"{name}.header", process_set)
        if not is_root:
            payload = np.empty(int(header[1]), np.uint8)
        verbs.broadcast_(payload, root_rank, name and f"{name}.bytes", process_set)
        if is_root and not header[0]:
            return obj
        return _load(bool(header[0]), payload, root_rank)

    def allgather_object(
        self, obj: Any, name: str | None = None, process_set: Group | None = None
    ) -> list[Any]:
        """Return the ``obj`` of every rank, in rank order (of this rank too, a copy).

        Raises InvalidArgumentError, on every rank, when one cannot be pickled, and on one that
        cannot read it; and what allgather raises.
        """
        failed, payload = _dump(obj)
        header = np.array([(failed, payload.size)], _HEADER).view(np.uint8)
        everything = self._collectives.allgather(
            np.concatenate([header, payload]), name, process_set
        )
        values = []
        at = 0
        size = self._collectives.membership(process_set).size
        for rank in range(size) if process_set is None else process_set.ranks:
            start = at + _HEADER.itemsize
            rank_failed, size = everything[at:start].copy().view(_HEADER)[0]
            at = start + int(size)
            values.append(_load(bool(rank_failed), everything[start:at], rank))
        return values


def _dump(obj: Any) -> tuple[bool, np.ndarray[Any, np.dtype[np.uint8]]]:
    """The pickle of ``obj``, or True and the text of why there is none."""
    try:
        buffer = io.BytesIO()
        cloudpickle.dump(obj, buffer)
        return False, np.frombuffer(buffer.getbuffer(), np.uint8)
    except Exception as error:  # whatever the object's own __reduce__ raises
        text = f"a {type(obj).__name__} that cannot be pickled: {error}"
        return True, np.frombuffer(bytearray(text.encode()), np.uint8)


def _load(failed: bool, payload: np.ndarray[Any, np.dtype[np.uint8]], rank: int) -> Any:
    if failed:
        raise InvalidArgumentError(f"rank {rank} gave {payload.tobytes().decode()}")
    try:
        return pickle.loads(payload.data)
    except Exception as error:  # a module that is not here, whatever the object itself raises
        raise InvalidArgumentError(
            f"rank {rank} gave an object that cannot be read on this one: "
            f"{type(error).__name__}: {error}"
        ) from error

"""Verbs that are one function of the engine's module where the common case is given to them.

That is one plain array of NumPy or tensor of PyTorch, of all ranks, without compression; see
csrc/bind/short_verb.h. For a few bytes Python's own calls would take longer than the exchange.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NoReturn

from kolovod import _native
from kolovod.core import spans
from kolovod.core.buffers import check_places
from kolovod.core.collectives import Collectives
from kolovod.core.frontend import Holder
from kolovod.core.handles import kept
from kolovod.core.submission import Submitter
from kolovod.core.verbs import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    REDUCESCATTER,
)
from kolovod.errors import from_engine

__all__ = ["ShortVerbs"]

# ShortForm in csrc/bind/short_verb.h.
_WITHOUT_TENSOR, _NEW, _IN_PLACE, _START_NEW, _START_IN_PLACE, _OTHER_ROWS, _SPLIT_ROWS = range(7)
_FORMS = {
    "allreduce": (ALLREDUCE, _NEW),
    "allreduce_": (ALLREDUCE, _IN_PLACE),
    "allreduce_async": (ALLREDUCE, _START_NEW),
    "allreduce_async_": (ALLREDUCE, _START_IN_PLACE),
    "broadcast": (BROADCAST, _NEW),
    "broadcast_": (BROADCAST, _IN_PLACE),
    "broadcast_async": (BROADCAST, _START_NEW),
    "broadcast_async_": (BROADCAST, _START_IN_PLACE),
    "allgather": (ALLGATHER, _OTHER_ROWS),
    "alltoall": (ALLTOALL, _SPLIT_ROWS),
    "reducescatter": (REDUCESCATTER, _OTHER_ROWS),
    "barrier": (BARRIER, _WITHOUT_TENSOR),
}


class ShortVerbs:
    """The verbs of ``collectives``, some of them as functions of the engine."""

    def __init__(self, collectives: Collectives, module: str) -> None:
        """``module``: the one that exports them. The tensors are NumPy's or PyTorch's."""
        self._collectives = collectives
        is_torch = collectives.frontend.framework == "torch"
        if Submitter.takes_all:
            return
        holder = collectives.frontend.holder if is_torch else None
        for name, (verb, form) in _FORMS.items():
            whole = getattr(collectives, name)
            makes = collectives.handle_type, collectives.frontend.from_bytes
            holds: tuple[Any, Any] = (None, None)
            if holder is not None:
                holds = holder.hold, partial(_still_there, holder, verb.name)
            refers_to = (whole, collectives.world, _failed, kept, spans.log, *makes, *holds)
            parameters = tuple(inspect.signature(whole).parameters)
            short: Any = _native.ShortVerb(verb.number, form, parameters, refers_to, is_torch)
            short.__wrapped__, short.__module__ = whole, module
            short.__name__, short.__qualname__, short.__doc__ = name, name, whole.__doc__
            setattr(self, name, short)

    def __getattr__(self, name: str) -> Any:
        """Return a verb that has no short form."""
        return getattr(self._collectives, name)


def _still_there(holder: Holder[Any], verb: str, tensor: Any, place: int, name: str) -> Any:
    check_places([(tensor, place)], holder, f"{verb} {name!r}" if name else verb)
    return tensor


def _failed(error: _native.EngineError) -> NoReturn:
    raise from_engine(error) from None

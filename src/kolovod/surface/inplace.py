"""The verbs that work in place, as type checkers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kolovod.core.collectives import Collectives

    _verbs = cast(Collectives, None)
    allreduce_ = _verbs.allreduce_
    allreduce_async_ = _verbs.allreduce_async_
    grouped_allreduce_ = _verbs.grouped_allreduce_
    grouped_allreduce_async_ = _verbs.grouped_allreduce_async_
    broadcast_ = _verbs.broadcast_
    broadcast_async_ = _verbs.broadcast_async_
else:
    __all__: list[str] = []

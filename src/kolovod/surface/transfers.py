"""Messages between two ranks, as type checkers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kolovod.core.transfers import Transfers

    _verbs = cast(Transfers, None)
    send = _verbs.send
    recv = _verbs.recv
    isend = _verbs.isend
    irecv = _verbs.irecv
else:
    __all__: list[str] = []

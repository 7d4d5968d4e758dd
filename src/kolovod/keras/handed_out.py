"""A record of gradients that were combined already when they come to be applied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A note on combined gradients, for the code that has got them."""

    graph: Any
    """The graph where they are of use: see the backend's ``current_graph``."""
    note: Any


class HandedOut:
    """Combined gradients that an optimizer has returned, and may be given back to apply."""

    def __init__(self, backend: Any, key: Callable[[Any], Hashable]) -> None:
        """``backend``: the module for what Keras runs on. ``key``: what identifies a variable."""
        self._backend = backend
        self._key = key
        self._known: dict[int, tuple[weakref.ref[Any], Note]] = {}
        """Notes by the ``id`` of a gradient, as long as that exists."""
        self._not_applied: dict[Hashable, Note] = {}
        """The last note of each variable whose gradient was not applied, or was only changed."""

    def __len__(self) -> int:
        """Return the number of gradients that may still be given back."""
        return len(self._known) + len(self._not_applied)

    def hand_out(self, pairs: Sequence[tuple[Any, Any]], note: Any) -> None:
        """Note ``pairs`` of combined gradients and variables, which are about to be returned."""
        out, known = Note(self._backend.current_graph(), note), self._known
        for grad, variable in pairs:
            self._not_applied[self._key(variable)] = out
            if grad is not None:
                number = id(grad)
                known[number] = weakref.ref(grad, partial(_forget, known, number)), out

    def take_back(self, pairs: Sequence[tuple[Any, Any]]) -> list[Note | None]:
        """Return the notes on ``pairs`` of gradients and variables that are applied now, or None.

        Known are the very gradients, whenever and however often they are applied, and what comes
        for a variable whose gradient was handed out last, and has not been applied: so many things
        can be done to a gradient that nothing tells a changed one from another.
        """
        found = []
        for grad, variable in pairs:
            key = self._key(variable)
            _, out = self._known.get(id(grad), (None, None))
            waiting = self._not_applied.get(key)
            if out is None and waiting is not None and self._backend.is_within(waiting.graph):
                out = waiting
            if out is None or out is waiting:
                self._not_applied.pop(key, None)
            found.append(out)
        return found


def _forget(known: dict[int, Any], number: int, _: object) -> None:
    known.pop(number, None)

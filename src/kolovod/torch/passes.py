"""The end of a backward pass, which PyTorch tells to whoever asks during the pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kolovod.core import deadlocks
from kolovod.private_apis.torch import (
    BACKWARD,
    NO_BACKWARD,
    current_backward,
    outer_node,
    uncompiled,
    when_backward_ends,
)
from kolovod.torch.rounds import combine
from kolovod.torch.step_state import PASSES

if TYPE_CHECKING:
    from kolovod.torch.reducer import GradientReducer


class _End:
    """The end of one backward pass. PyTorch keeps it as long as the pass is under way."""

    def __init__(self) -> None:
        self.reducers: dict[GradientReducer, None] = {}

    def __call__(self) -> None:
        """Combine gradients, those of the same ranks in one round."""
        _combine_all(self.reducers)


@uncompiled
def _combine_all(reducers: Iterable[GradientReducer]) -> None:
    purposes: dict[object, dict[GradientReducer, int]] = {}
    for reducer in reducers:
        reducer.passes_ended()
        if reducer.is_to_be_combined():
            group = purposes.setdefault(reducer.verbs.world().engine, {})
            group[reducer] = PASSES
    groups = list(purposes.values())
    for group in sorted(groups, key=_ranks) if len(groups) > 1 else groups:
        combine(group)


# On a GPU the end is told in a thread of PyTorch's, for which the one that has called it waits.
deadlocks.stands_for(_End.__call__.__code__, BACKWARD)

_under_way: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
"""The passes that go on, by the number that PyTorch gives to each."""


class Passes:
    """Has a reducer's gradients combined at the end of each backward pass that reaches them.

    A backward that a function runs in its own (``torch.utils.checkpoint`` with ``use_reentrant``)
    is a part of the outer one, whose end counts: then all gradients are there.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        """Nothing happens before ``watch``."""
        self.reducer = reducer
        self.known = self._asked = NO_BACKWARD
        """The pass, as ``current_backward`` says it, that ``watch`` was called in last."""

    def watch(self) -> None:
        """Note that a gradient of the present pass is there."""
        task = current_backward()
        self.known = task
        if task != self._asked:
            self._ask(task)

    def ended(self) -> None:
        """Note that the pass is over."""
        self.known = self._asked = NO_BACKWARD

    def _ask(self, task: int) -> None:
        node = outer_node()
        if node is not None:
            node.register_hook(lambda *_: self.watch())  # runs in the outer pass
            return
        self._asked = task  # that of a pass which has failed is forgotten
        end = _under_way.get(task)
        if end is None:
            end = _under_way[task] = _End()
            when_backward_ends(end)
        end.reducers[self.reducer] = None


def _ranks(group: Mapping[GradientReducer, int]) -> list[int]:
    """Return the key that sorts process sets alike on all ranks; that of all ranks comes first."""
    process_set = next(iter(group)).spec.process_set
    return [] if process_set is None else list(process_set.ranks)

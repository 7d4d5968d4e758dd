"""The end of a backward pass, which PyTorch tells to whoever asks during the pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kolovod.core import deadlocks
from kolovod.torch.rounds import combine
from kolovod.torch.step_state import PASSES

if TYPE_CHECKING:
    from kolovod.torch.reducer import GradientReducer

_task_of_now = torch._C._current_graph_task_id
_BACKWARD = torch.autograd.backward.__code__
_ENGINE = [
    function.__code__
    for function in [getattr(torch.autograd.graph, "_engine_run_backward", None)]  # since 2.3
    if function is not None
]
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
_NONE = -1


class _End:
    """The end of one backward pass. PyTorch keeps it as long as the pass is under way."""

    def __init__(self) -> None:
        self.reducers: dict[GradientReducer, None] = {}

    def __call__(self) -> None:
        """Gradients are combined, among the same ranks in one round."""
        purposes: dict[object, dict[GradientReducer, int]] = {}
        for reducer in self.reducers:
            reducer.passes_ended()
            if reducer.is_to_be_combined():
                group = purposes.setdefault(reducer.verbs.world().engine, {})
                group[reducer] = PASSES
        for group in sorted(purposes.values(), key=_ranks):
            combine(group)


# On a GPU the end is told in a thread of PyTorch's, for which the one that has called it waits.
deadlocks.stands_for(_End.__call__.__code__, {_BACKWARD, torch.autograd.grad.__code__, *_ENGINE})

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
        self._known = self._asked = _NONE

    def watch(self) -> None:
        """A gradient of the present pass is there. It costs little to call this for each."""
        task = _task_of_now()
        if task != self._known:
            self._known = task
            if task != self._asked:
                self._ask(task)

    def ended(self) -> None:
        """The pass is over."""
        self._known = self._asked = _NONE

    def _ask(self, task: int) -> None:
        node = _outer_node()
        if node is not None:
            node.register_hook(lambda *_: self.watch())  # runs in the outer pass
            return
        self._asked = task  # that of a pass which has failed is forgotten
        end = _under_way.get(task)
        if end is None:
            end = _under_way[task] = _End()
            torch.autograd.Variable._execution_engine.queue_callback(end)
        end.reducers[self.reducer] = None


def _ranks(group: Mapping[GradientReducer, int]) -> list[int]:
    """Return the key that sorts process sets alike on all ranks; that of all ranks comes first."""
    process_set = next(iter(group)).spec.process_set
    return [] if process_set is None else list(process_set.ranks)


def _outer_node() -> Any:
    """The outermost function in whose backward the present pass was begun, or None."""
    frame, is_within, node = sys._getframe(2), False, None
    while frame is not None:
        if frame.f_code is _BACKWARD:
            is_within = True
        elif frame.f_code is _NODE and is_within:
            node = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return node

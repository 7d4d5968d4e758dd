"""Optimizers' steps in timelines, ``kolovod top`` and metrics.

Every step of every optimizer of PyTorch's is seen by PyTorch's global hooks, so that jobs with
DistributedDataParallel, or with what builds on it, have steps as those of ours have. They are
registered once somebody reads spans, since torch.compile looks at them.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kolovod.core import spans


class _Stepping(threading.local):
    """The optimizer that steps in this thread: where one steps within another, the outer one."""

    optimizer: weakref.ref[Optimizer] | None = None
    span: spans.span


_stepping = _Stepping()


def _before(optimizer: Optimizer, arguments: Any, named: Any) -> Any:
    """Begin the span. A closure is no part of it: it has the forward and backward passes."""
    if not spans.log.on or hasattr(optimizer, "_kolovod_is_trial"):
        return None
    outer = None if _stepping.optimizer is None else _stepping.optimizer()
    if outer is not None and outer is not optimizer and _is_stepping(outer):
        return None
    _stepping.optimizer = weakref.ref(optimizer)
    _begin()
    if callable(named.get("closure")):
        return arguments, {**named, "closure": _without(named["closure"])}
    if len(arguments) > 1 and callable(arguments[1]):
        return (arguments[0], _without(arguments[1]), *arguments[2:]), named
    return None


def _begin() -> None:
    _stepping.span = spans.span(spans.OPTIMIZER_STEP)
    _stepping.span.__enter__()


def _without(closure: Callable[..., Any]) -> Callable[..., Any]:
    """``closure``, at whose end the step begins anew."""

    @functools.wraps(closure)
    def called(*arguments: Any, **named: Any) -> Any:
        loss = closure(*arguments, **named)
        _begin()
        return loss

    return called


def _after(optimizer: Optimizer, *_: Any) -> None:
    """End the span."""
    if _stepping.optimizer is not None and _stepping.optimizer() is optimizer:
        _stepping.optimizer = None
        _stepping.span.__exit__(None, None, None)


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``step`` is among our callers.

    A step that has raised calls no hook at its end, so the record alone does not tell. Other
    frames are not looked into: before Python 3.13 that keeps all that they name alive, the
    script's tensors too.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _install() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


spans.log.when_read(_install)

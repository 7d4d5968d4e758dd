"""Clipping gradients: averaged first, then clipped, with nothing to call in between.

A script clips between backward and step, when gradients are on their way to the other ranks: what
it would measure and scale is this rank's own. PyTorch offers no place to step in, so its two
functions are made to wait for the gradients of the parameters that they are given; that they do
from the first DistributedOptimizer of more than one rank on, and nothing else about them changes.

Other changes in place are still found out and refused (``GradientReducer``): nobody can know of
them in time. So are those by ``torch.nn.utils.clip_grads_with_norm_``, whose norm was made from
gradients alone, which do not say whose they are.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class Averaging(Protocol):
    """What keeps the gradients of some parameters equal on all ranks."""

    def owns(self, ids: set[int]) -> bool:
        """Whether one of its parameters has one of these values of ``id``."""
        ...

    def settle(self) -> None:
        """Average the gradients, unless that is done or not wanted."""
        ...


_lock = threading.Lock()
_numbers = itertools.count()
_all: weakref.WeakValueDictionary[int, Averaging] = weakref.WeakValueDictionary()
_is_installed = False


def watch(averaging: Averaging) -> None:
    """From now on, gradients of ``averaging`` are settled before they are clipped."""
    global _is_installed
    with _lock:
        _all[next(_numbers)] = averaging
        if not _is_installed:
            for name in _NAMES:
                _install(name)
            _is_installed = True


def _install(name: str) -> None:
    """Inside the function where it can be, so that scripts that imported it by name have it too."""
    function = getattr(clip_grad, name)
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:  # PyTorch's own wrapper: no_grad
            cell.cell_contents = _settling(inner)
            return
    for module in (clip_grad, torch.nn.utils):
        setattr(module, name, _settling(function))


def _settling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            given = [parameters]
        else:
            given = list(parameters)
            # PyTorch warns of generators, and only of those, that yield nothing.
            is_generator = isinstance(parameters, types.GeneratorType)
            parameters = (parameter for parameter in given) if is_generator else given
        _settle({id(parameter) for parameter in given})
        return function(parameters, *args, **kwargs)

    return clip


def _settle(ids: set[int]) -> None:
    """In order of creation, so that all ranks go alike."""
    with _lock:
        everyone = sorted(_all.items())
    for _, averaging in everyone:
        if averaging.owns(ids):
            averaging.settle()

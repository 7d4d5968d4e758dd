"""Adding methods to an optimizer that stays the object it is, and an instance of its class."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kolovod.core.world import current
from kolovod.errors import NotInitializedError

Base = type[torch.optim.Optimizer]


def wrap(optimizer: torch.optim.Optimizer, addition: Base) -> None:
    """Put ``addition`` before the optimizer's class, which it will know as ``_kolovod_base``."""
    base = type(optimizer)
    fields: dict[str, Any] = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_kolovod_base": base,
        "__new__": _new_of(base),
    }
    scheduled = optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(base.__name__, (addition, base), fields)
    if hasattr(scheduled, "_wrapped_by_lr_sched"):
        _track_steps(optimizer)


def _new_of(base: Base) -> Callable[..., torch.optim.Optimizer]:
    """Return a ``__new__``, so that ``type(optimizer)(...)`` makes a plain optimizer."""

    def __new__(cls: Base, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if "_kolovod_base" not in cls.__dict__:  # a class that the script has derived from it
            return base.__new__(cls)
        return _told(base(*args, **kwargs), "is made of the class of a DistributedOptimizer")

    return __new__


def unwrapped(optimizer: torch.optim.Optimizer, base: Base) -> tuple[Any, ...]:
    """Return ``__reduce__``'s value, for a plain optimizer: a copy or a pickle has no world."""
    return told_copy, (base, optimizer.__getstate__())


def told_copy(base: Base, state: dict[str, Any]) -> torch.optim.Optimizer:
    """A ``plain_copy`` that says what it is when it first steps among several ranks."""
    return _told(plain_copy(base, state), "is a copy of a DistributedOptimizer")


def _told(plain: torch.optim.Optimizer, what: str) -> torch.optim.Optimizer:
    """``plain``, which says what it is when it first steps among several ranks."""
    name = type(plain).__name__

    def tell(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        is_wrapped = hasattr(optimizer, "_kolovod_base")
        if is_wrapped or _has_others():
            handle.remove()
        if not is_wrapped and _has_others():
            warnings.warn(
                f"this {name} {what}, and steps with this rank's own gradients, so that ranks "
                "train different models: give it to DistributedOptimizer, unless that is what it "
                "is for",
                stacklevel=3,
            )

    handle = plain.register_step_pre_hook(tell)
    return plain


def _has_others() -> bool:
    try:
        return current().size > 1
    except NotInitializedError:
        return False


def plain_copy(base: Base, state: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of class ``base`` with what another's ``__getstate__`` has returned."""
    copy = base.__new__(base)
    copy.__setstate__(state)
    return copy


def _track_steps(optimizer: torch.optim.Optimizer) -> None:
    """Note calls of ``step``, as a scheduler made before did by replacing it on the instance."""
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        alive._opt_called = True  # type: ignore[attr-defined]
        return function(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]

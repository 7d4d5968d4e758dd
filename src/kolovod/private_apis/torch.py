"""Parts of PyTorch that its documentation does not promise, and our front ends use."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = [
    "BACKWARD",
    "NO_BACKWARD",
    "current_backward",
    "current_node",
    "is_in_transform",
    "is_unscaling",
    "no_torch_function",
    "outer_node",
    "raw_stream",
    "references_to_storage",
    "returns_plain_tensors",
    "subclassed",
    "uncompiled",
    "warn_of_older",
    "when_backward_ends",
]

NO_BACKWARD = -1
"""The answer of ``current_backward`` outside of backward."""
current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Autograd's number of the pass that this thread is in."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The function whose gradients this thread computes; None: it is in none."""
when_backward_ends: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Has a function called when the pass that this thread is in has ended. Raises outside of one."""
references_to_storage: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""Counts who refers to the memory of ``UntypedStorage._cdata``; None: this version cannot."""
raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The current stream of a GPU, as a number; None: this version is built without GPUs."""
is_in_transform: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False
)
"""Tells whether a tensor stands for others, under ``torch.func``."""
no_torch_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""A context in which subclasses' and modes' ``__torch_function__`` is not asked."""
subclassed: Callable[[type, torch.Tensor], Any] = torch.Tensor._make_subclass
"""Returns a tensor as one of a subclass; ``as_subclass`` takes no sparse ones."""
returns_plain_tensors: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass whose results are plain tensors."""

OLDEST = 2, 6
"""The first version of PyTorch that ours was tried with."""

P = ParamSpec("P")
T = TypeVar("T")

_compiler: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame,
    "get_eval_frame_callback",
    lambda: sys.modules.get("torch._dynamo"),  # not in older versions
)
"""Returns what looks at functions before Python runs them, in this thread; None: nobody."""
_BACKWARD = torch.autograd.backward.__code__
_NODE = torch.autograd.function.BackwardCFunction.apply.__code__
BACKWARD: frozenset[CodeType] = frozenset(
    function.__code__
    for function in (
        torch.autograd.backward,
        torch.autograd.grad,
        getattr(torch.autograd.graph, "_engine_run_backward", None),  # since 2.3
    )
    if function is not None
)
"""Where a thread is that waits for a backward pass."""


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` as one that ``torch.compile`` leaves alone, with all that it calls.

    ``torch.compiler.disable`` loads the compiler, which takes a second: it is asked only where the
    compiler is at work.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _compiler() is None:
            return function(*args, **kwargs)
        return left_alone()(*args, **kwargs)

    @functools.cache
    def left_alone() -> Callable[P, T]:
        disabled: Callable[P, T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled

    return call


def is_unscaling(depth: int) -> bool:
    """Return whether a GradScaler divides gradients in the caller that is ``depth`` above this.

    It divides them in ``unscale_`` and in its ``step``, and offers no hook before.
    """
    return sys._getframe(depth + 1).f_code.co_name == "_unscale_grads_"


def outer_node() -> Any:
    """Return the outermost function in whose backward the present pass was begun, or None.

    Autograd knows the innermost only.
    """
    frame, is_within, node = sys._getframe(1), False, None
    while frame is not None:
        if frame.f_code is _BACKWARD:
            is_within = True
        elif frame.f_code is _NODE and is_within:
            node = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return node


def warn_of_older() -> None:
    """Warn where PyTorch is older than ``OLDEST``.

    With 2.1 gradients of reentrant backward passes (``torch.utils.checkpoint``) lack a part: there
    the end of an inner pass is told as that of the outer one.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        warnings.warn(
            f"this is PyTorch {torch.__version__}; Kolovod was not tried with any before "
            f"{'.'.join(map(str, OLDEST))}, and knows that with 2.1 reentrant checkpoints "
            "(torch.utils.checkpoint) are given wrong gradients: install a newer one",
            stacklevel=3,
        )

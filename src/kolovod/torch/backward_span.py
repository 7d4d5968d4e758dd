"""Backward passes in the timeline.

PyTorch tells nobody when a backward begins, so ``torch.autograd.backward``, which
``Tensor.backward`` calls, is replaced by one that looks at the clock. Only in processes that record
timelines.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kolovod.core.spans import span
from kolovod.observe import timeline


def _install() -> None:
    original = torch.autograd.backward
    if hasattr(original, "_kolovod_original"):
        return

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        with span("backward"):
            original(*args, **kwargs)

    backward._kolovod_original = original  # type: ignore[attr-defined]
    torch.autograd.backward = backward


timeline.when_recording(_install)

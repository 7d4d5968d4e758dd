"""Gradients that are not finite on this rank, before DDP or FSDP combines them: which rank it was.

Afterwards they are so on all ranks, and nobody can tell. What a backward pass reduces is looked at:
the beginning of each tensor, and all of it by and by (``torch.sentinel``). It is said when an
optimizer steps with it: a script that skips the step, as a GradScaler does, has seen to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from kolovod import _native
from kolovod.core.submission import EngineTensor
from kolovod.gradients import sentinel
from kolovod.torch.frontend import AVERAGED
from kolovod.torch.sentinel import BEGINNING, WHOLE_BYTES

__all__ = ["Health", "health"]

_LOOKED_AT = frozenset(AVERAGED.values())


class Health:
    """The record of whether this process's gradients are finite."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._backward = -1  # the pass that is looked at, as autograd numbers it
        self._is_bad = False
        self._is_told = False
        self._looked_at = self._next = 0  # bytes, in this pass; from which to look at all
        self._passes = 0
        self._hook: Any = None

    def begin(self) -> None:
        """Watch optimizers' steps: there is a group. Idempotent."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._step)

    def look(self, backward: int, entries: Sequence[EngineTensor]) -> None:
        """Look at the tensors that the pass ``backward`` reduces."""
        if self._is_told or sentinel.policy() == "off":
            return
        if backward != self._backward:
            self._backward, self._is_bad = backward, False
            self._passes += 1
            is_over = self._looked_at <= self._next + WHOLE_BYTES
            self._next = 0 if is_over else self._next + WHOLE_BYTES
            self._looked_at = 0
        known = [entry for entry in entries if entry[0] in _LOOKED_AT]
        due = self._next, self._next + WHOLE_BYTES
        found, count = _native.which_not_finite(known, BEGINNING, self._looked_at, due)
        self._looked_at += count
        self._is_bad |= bool(found)

    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_bad or self._is_told:
            return
        self._is_bad, bad, is_sharded = False, [], False
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if not _is_finite(parameter):  # by what another rank has brought before
                    self._is_told = True
                    return
                is_sharded |= hasattr(parameter.grad, "to_local")
                if not _is_finite(parameter.grad):
                    bad.append(f"parameter {i} of group {g}, of shape {tuple(parameter.shape)}")
        if is_sharded and not bad:
            bad = ["parameters whose parts other ranks have"]
        if bad and dist.is_initialized():  # else the script has seen to it
            self._is_told = True
            name = f"{bad[0]} of {type(optimizer).__name__}"
            when = f"backward pass {self._passes}"
            text = sentinel.of_gradients([dist.get_rank()], when, name, len(bad) - 1)
            sentinel.warn(text, "this is said once")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are finite; of a sparse or sharded tensor, those of this rank."""
    local: Any = getattr(tensor, "to_local", None)
    with torch.no_grad():
        values = tensor.detach() if local is None else local()
        return bool(torch.isfinite(values._values() if values.is_sparse else values).all())


health = Health()
"""The record of all groups: a model's gradients may go over several."""

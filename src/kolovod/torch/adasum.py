"""Adasum for optimizers: every rank steps by itself, and the steps are combined.

The step of a parameter is what the rank's own optimizer makes of the rank's own gradient, momentum
and all; Adasum adds up the ranks' steps such that those that point the same way do not overshoot
(Maleki et al., 2020). So the learning rate is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from kolovod.core import spans
from kolovod.errors import InvalidArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import DTYPES, refusal
from kolovod.torch.wrapping import unwrapped, wrap

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class ByAdasum(torch.optim.Optimizer):
    """What ``DistributedOptimizer(op=Adasum)`` adds to the class of the optimizer."""

    _kolovod_base: type[torch.optim.Optimizer]
    _kolovod_named: list[tuple[str, torch.Tensor]]
    _kolovod_verbs: TorchCollectives
    _kolovod_spec: ReduceSpec
    _kolovod_passes: int

    def synchronize(self) -> None:
        """Nothing: gradients stay the rank's own; it is steps that are combined."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible. Raises InvalidArgumentError, which is an AssertionError too."""
        raise SkippedAdasumError(
            "with op Adasum steps are combined, not gradients, so that there is nothing to skip"
        )
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to hold back: gradients add up until ``step``, and are not sent at all."""
        yield

    @property
    def backward_passes_per_step(self) -> int:
        """As it was given; gradients add up until ``step``, however many passes there are."""
        return self._kolovod_passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing but ``backward_passes_per_step``."""
        self._kolovod_passes = checked_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, combine the ranks' steps, and take that from where the parameters were."""
        spec, verbs = self._kolovod_spec, self._kolovod_verbs
        if not spec.has_others(verbs.world, without_world=False):
            return super().step() if closure is None else super().step(closure)
        named = [(name, p) for name, p in self._kolovod_named if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype not in DTYPES:
                raise InvalidArgumentError(f"parameter '{name}': {refusal(parameter.dtype)}")
        before = [parameter.detach().clone() for _, parameter in named]
        with spans.span(spans.OPTIMIZER_STEP):
            result = super().step() if closure is None else super().step(closure)
        waits = []
        submit = exchange.by(verbs, spec, in_place=True)
        scaled = exchange.scaling(verbs, spec)
        with torch.no_grad():
            for (name, parameter), start in zip(named, before, strict=True):
                step = [(name, parameter - start)]
                waits.append(exchange.start(spec, f"step.{name}", step, submit, scaled))
            for (_, parameter), start, wait in zip(named, before, waits, strict=True):
                parameter.copy_(start + wait()[0])
        return result

    step.hooked = True  # type: ignore[attr-defined]  # see optimizer.py

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As usual; the steps of the new parameters are combined, too."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        known = {id(parameter) for _, parameter in self._kolovod_named}
        self._kolovod_named += [
            (f"{group}.{i}", parameter)
            for i, parameter in enumerate(self.param_groups[group]["params"])
            if id(parameter) not in known
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain optimizers of the base class: a copy has no world."""
        return unwrapped(self, self._kolovod_base)


class SkippedAdasumError(InvalidArgumentError, AssertionError):
    """``skip_synchronize`` with op Adasum."""


def by_adasum(
    optimizer: O,
    named: list[tuple[str | None, torch.Tensor]],
    spec: ReduceSpec,
    verbs: TorchCollectives,
    passes: int,
) -> O:
    """Make ``optimizer`` one of these, and return it. Raises InvalidArgumentError."""
    size = verbs.world().size
    if size & (size - 1) != 0:
        raise InvalidArgumentError(f"op Adasum: {size} ranks are not a power of two")
    wrap(optimizer, ByAdasum)
    assert isinstance(optimizer, ByAdasum)
    optimizer._kolovod_named = [(name, p) for name, p in named if name is not None]
    optimizer._kolovod_verbs = verbs
    optimizer._kolovod_spec = spec
    optimizer._kolovod_passes = passes
    return optimizer

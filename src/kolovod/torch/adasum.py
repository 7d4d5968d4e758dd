"""Adasum for optimizers: every rank steps by itself, and the steps are combined.

The step of a parameter is what the rank's own optimizer makes of the rank's own gradient, momentum
and all; Adasum adds up the ranks' steps such that those that point the same way do not overshoot
(Maleki et al., 2020). So the learning rate is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.spec import ReduceSpec, checked_passes
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.frontend import AVERAGED, refusal
from kolovod.torch.parameters import Named, Roll
from kolovod.torch.wrapping import unwrapped, wrap

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


class ByAdasum(torch.optim.Optimizer):
    """The methods that ``DistributedOptimizer(op=Adasum)`` adds to the class of the optimizer."""

    _kolovod_base: type[torch.optim.Optimizer]
    _kolovod_named: list[tuple[str, torch.Tensor]]
    _kolovod_roll: Roll
    _kolovod_verbs: TorchCollectives
    _kolovod_spec: ReduceSpec
    _kolovod_passes: int

    def synchronize(self) -> None:
        """Do nothing: gradients stay the rank's own; it is steps that are combined."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise InvalidArgumentError, which is an AssertionError too: it is not possible."""
        raise SkippedAdasumError(
            "with op Adasum steps are combined, not gradients, so that there is nothing to skip"
        )
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Change nothing: gradients add up until ``step``, and are not sent at all."""
        yield

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Raise InvalidArgumentError: it is not possible."""
        raise FrontEndArgumentError(
            "with op Adasum steps are combined, not gradients, so that no communication hook is "
            "called: use op Average"
        )

    @property
    def backward_passes_per_step(self) -> int:
        """The number that was given; gradients add up until ``step``, over any number of passes."""
        return self._kolovod_passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change nothing but ``backward_passes_per_step``."""
        self._kolovod_passes = checked_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, combine the ranks' steps, and add the result to what the parameters were."""
        spec, verbs = self._kolovod_spec, self._kolovod_verbs
        if not spec.has_others(verbs.world, without_world=False):
            if spec.steps_apart:
                transaction().run(lambda: None, counts=True)
            return super().step() if closure is None else super().step(closure)
        size = verbs.world().size
        if size & (size - 1) != 0:  # before the parameters have changed
            raise FrontEndArgumentError(
                f"op Adasum: {size} ranks are not a power of two; use Average"
            )
        taken = [name for name, _ in self._kolovod_named]
        self._kolovod_named += _with_names(self._kolovod_roll.new(self.param_groups, {}, taken))
        named = [(name, p) for name, p in self._kolovod_named if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype not in AVERAGED or parameter.is_complex():
                raise FrontEndArgumentError(f"parameter '{name}': {refusal(parameter.dtype)}")
        before = [parameter.detach().clone() for _, parameter in named]
        result = super().step() if closure is None else super().step(closure)
        with torch.no_grad():
            attempt = partial(self._kolovod_combined, named, before)
            combined = transaction().run(attempt, counts=True)
            for (_, parameter), start, step in zip(named, before, combined, strict=True):
                parameter.copy_(start + step)
        return result

    def _kolovod_combined(
        self, named: list[tuple[str, torch.Tensor]], before: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the ranks' steps from ``before`` to the parameters, combined."""
        spec, verbs = self._kolovod_spec, self._kolovod_verbs
        own = [parameter - start for (_, parameter), start in zip(named, before, strict=True)]
        if not spec.has_others(verbs.world, without_world=False):  # they are lost
            return own
        submit = exchange.by(verbs, spec, in_place=True)
        scaled = exchange.scaling(verbs, spec)
        waits = [
            exchange.start(spec, f"step.{name}", [(name, step)], submit, scaled)
            for (name, _), step in zip(named, own, strict=True)
        ]
        return [wait()[0] for wait in waits]

    step.hooked = True  # type: ignore[attr-defined]  # see optimizer.py

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain optimizers of the base class: a copy has no world."""
        return unwrapped(self, self._kolovod_base)


class SkippedAdasumError(FrontEndArgumentError, AssertionError):
    """``skip_synchronize`` with op Adasum."""


def by_adasum(
    optimizer: O,
    named: list[Named],
    spec: ReduceSpec,
    verbs: TorchCollectives,
    passes: int,
) -> O:
    """Make ``optimizer`` a ``ByAdasum``, and return it. Raises NotInitializedError."""
    verbs.world()
    wrap(optimizer, ByAdasum)
    assert isinstance(optimizer, ByAdasum)
    optimizer._kolovod_named = _with_names(named)
    optimizer._kolovod_roll = Roll(optimizer)
    optimizer._kolovod_verbs = verbs
    optimizer._kolovod_spec = spec
    optimizer._kolovod_passes = passes
    return optimizer


def _with_names(named: list[Named]) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for name, parameter in named if name is not None]

"""What training with seldom communication has in common: parameters, their exchange, the warm-up.

``local_sgd.py`` and ``diloco.py`` are the two ways.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kolovod.core.ops import Average
from kolovod.core.process_sets import ProcessSet
from kolovod.elastic import steps
from kolovod.errors import InvalidArgumentError
from kolovod.gradients import exchange
from kolovod.gradients.agreement import Agreement
from kolovod.gradients.compression import AnyCompressor, Compression
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch.autograd import TorchCollectives

Named = Sequence[tuple[str, torch.Tensor]]


class Exchange:
    """The mean over the ranks of tensors of a model, by a name of its own on all ranks."""

    def __init__(
        self,
        kind: str,
        compression: AnyCompressor,
        process_set: ProcessSet | None,
        verbs: TorchCollectives,
    ) -> None:
        """``kind``: what names begin with. Raises InvalidArgumentError."""
        self.spec = ReduceSpec.checked(compression, Average, 1.0, process_set, (Average,))
        self._plain = ReduceSpec.checked(Compression.none, Average, 1.0, process_set, (Average,))
        self._kind = kind
        self._verbs = verbs
        self._agreement = Agreement(verbs.world, process_set)

    @property
    def has_others(self) -> bool:
        """Whether this rank has others to exchange with, in the world of now."""
        return self.spec.has_others(
            lambda: self._verbs.membership(self.spec.process_set), without_world=False
        )

    def agree(
        self, details: list[tuple[str, Any]], parameters: Named, *, are_equal: bool = True
    ) -> None:
        """Once in each world: all ranks have the same, and the same values if these ``are_equal``.

        Raises MismatchError on every rank where they do not, InvalidArgumentError in an elastic
        job.
        """
        if self._agreement.is_current():
            return
        if steps.ongoing() is not None:
            raise InvalidArgumentError(
                f"{self._kind} does not work in elastic jobs: their ranks agree after each step, "
                "which is what it leaves out; start the job without --elastic"
            )
        described = [(name, (tuple(p.shape), str(p.dtype))) for name, p in parameters]
        values = [
            (f"the values of {name}", _checksum(p)) for name, p in (parameters if are_equal else ())
        ]
        self._agreement.reach([*details, *described, *values])

    def start(
        self,
        what: str,
        tensors: Named,
        further: Sequence[torch.Tensor] = (),
        *,
        is_compressed: bool = True,
    ) -> Callable[[], list[torch.Tensor]]:
        """Send ``tensors``, which may be overwritten; what is returned waits for their means.

        ``further``: the same, as they are; their means come last.
        """
        spec = self.spec if is_compressed else self._plain
        return exchange.start(
            spec,
            f"{self._kind}.{self._agreement.number}.{what}",
            list(tensors),
            exchange.by(self._verbs, spec, in_place=True),
            exchange.scaling(self._verbs, spec),
            further,
        )

    def before_step(self, agree: Callable[[], None], parameters: Named, *, warms_up: bool) -> None:
        """What an optimizer's step begins with: agree, and in the warm-up average gradients."""
        if not self.has_others:
            return
        agree()
        if warms_up:
            self._average_gradients(parameters)

    def _average_gradients(self, parameters: Named) -> None:
        """Each parameter's gradient is the ranks' mean; of one that has none it counts as zeros."""
        gradients = [
            (name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in parameters
        ]
        means = self.start("gradients", gradients, is_compressed=False)()
        for (_, parameter), mean in zip(parameters, means, strict=True):
            parameter.grad = mean


def parameters_of(model: torch.nn.Module) -> Named:
    """Those that are trained. Raises InvalidArgumentError for what is no model, or has none."""
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise InvalidArgumentError("the model has no parameter that is trained")
    return found


def buffers_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Those that are averaged: running statistics, which are floats."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def checked_steps(label: str, value: Any, least: int) -> int:
    """A number of steps. Raises InvalidArgumentError, which calls it ``label``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(f"{label} is {value!r}: give an int of at least {least}")
    return value


def check_optimizer(label: str, optimizer: Any) -> None:
    """Raise InvalidArgumentError, which calls it ``label``, for what is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{label} is a {type(optimizer).__name__}: give a torch.optim.Optimizer"
        )


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes())

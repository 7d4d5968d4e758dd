"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy and Jaggi, 2019).

A gradient M of n rows and m columns travels as P (n x rank) and Q (m x rank), one step of a power
iteration that begins with the Q of the step before. What the product leaves out is this rank's
error, and is added to its next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kolovod.core.handles import Handle
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.periodic import checked_steps
from kolovod.torch.comm_hooks import Future, GradBucket
from kolovod.torch.device import split

_HALF = (torch.float16, torch.bfloat16)
_SEED = 0x5EED


@dataclass
class _Kept:
    """The tensors that one bucket carries from step to step."""

    shapes: list[tuple[int, ...]]
    """The shapes of its gradients; another plan begins anew."""
    q: list[torch.Tensor]
    """The Q of each matrix, m x rank; the same on all ranks."""
    errors: list[torch.Tensor]
    """The part of each matrix that this rank has not got across so far, n x m."""


@dataclass
class _Layout:
    """Which gradients of a bucket are sent as matrices, by their places in it."""

    matrices: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)


class PowerSGD:
    """A communication hook that sends gradients as products of matrices of a low rank.

    ``optimizer.register_comm_hook(None, kv.PowerSGD(rank=4))``. Gradients of two and more
    dimensions are matrices of ``shape[0]`` rows. Of those that a product would make less than
    ``least_ratio`` times smaller, and of all others, the mean is taken as they are.

    ``rank``: columns of P and Q; more are nearer to the gradient and take more bytes.
    ``warm_up_steps``: so many steps at first, and in each new world, take exact means.
    ``least_ratio``: elements of the gradient by those of P and Q.

    The result is the same on all ranks that compute alike. Errors are kept in float32 or the
    gradient's dtype if that is wider, so a rank needs memory of its gradients' size once more.
    Where a gradient has infinities or NaN, so has the result, and the error of that bucket begins
    anew. Raises InvalidArgumentError for arguments that cannot work.
    """

    def __init__(self, rank: int = 4, *, warm_up_steps: int = 10, least_ratio: float = 2.0) -> None:
        """Check the arguments, which the class explains. Raises InvalidArgumentError."""
        self.rank = checked_steps("rank", rank, 1)
        self.warm_up_steps = checked_steps("warm_up_steps", warm_up_steps, 0)
        if not isinstance(least_ratio, int | float) or not least_ratio >= 1.0:
            raise FrontEndArgumentError(f"least_ratio is {least_ratio!r}: give a number >= 1")
        self.least_ratio = least_ratio
        self._kept: dict[int, _Kept] = {}
        self._steps: dict[int, int] = {}
        self._on_their_way: list[_Pending] = []

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, warm_up_steps={self.warm_up_steps})"

    def __call__(self, state: Any, bucket: GradBucket) -> Future:
        """Begin to combine a bucket: see ``register_comm_hook``. ``state`` is not used."""
        place = bucket.index()
        step = self._steps[place] = self._steps.get(place, 0) + 1
        if step <= self.warm_up_steps:
            return bucket.average(bucket.buffer())
        pending = _Pending(self, bucket, self._layout(bucket))
        self._on_their_way.append(pending)
        return pending

    def reset(self) -> None:
        """Forget errors and matrices, and warm up anew; ranks call it together."""
        self._kept.clear()
        self._steps.clear()
        self._on_their_way.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a later run; errors are this rank's, so each rank saves its own."""
        return {
            "rank": self.rank,
            "steps": dict(self._steps),
            "buckets": {
                place: {
                    "shapes": list(kept.shapes),
                    "q": [q.clone() for q in kept.q],
                    "errors": [error.clone() for error in kept.errors],
                }
                for place, kept in self._kept.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` has returned.

        Raises InvalidArgumentError if that was of another rank.
        """
        if state["rank"] != self.rank:
            raise FrontEndArgumentError(
                f"the state is of PowerSGD(rank={state['rank']}), this is of rank {self.rank}"
            )
        self._steps = dict(state["steps"])
        self._kept = {
            place: _Kept(
                [tuple(shape) for shape in kept["shapes"]],
                [q.clone() for q in kept["q"]],
                [error.clone() for error in kept["errors"]],
            )
            for place, kept in state["buckets"].items()
        }

    def _layout(self, bucket: GradBucket) -> _Layout:
        layout = _Layout()
        for i, parameter in enumerate(bucket.parameters()):
            fits = parameter.dim() > 1 and parameter.is_floating_point()
            if fits:
                n, m = parameter.shape[0], math.prod(parameter.shape[1:])
                rank = min(self.rank, n, m)
                fits = n * m >= (n + m) * rank * self.least_ratio
            (layout.matrices if fits else layout.whole).append(i)
        return layout

    def _of(self, bucket: GradBucket, matrices: Sequence[torch.Tensor]) -> _Kept:
        place = bucket.index()
        kept = self._kept.get(place)
        shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
        if kept is None or kept.shapes != shapes:
            drawn = torch.Generator().manual_seed(_SEED + place)
            starts = [_start(matrix, self.rank, drawn) for matrix in matrices]
            kept = _Kept(shapes, starts, [torch.zeros_like(matrix) for matrix in matrices])
            self._kept[place] = kept
        return kept

    def _advance(self) -> None:
        """Send the Q of all buckets whose P is to be waited for; so they overlap."""
        on_their_way, self._on_their_way = self._on_their_way, []
        for pending in on_their_way:
            pending.second()


class _Pending:
    """One bucket on its way: first P and what goes as it is, then Q."""

    def __init__(self, owner: PowerSGD, bucket: GradBucket, layout: _Layout) -> None:
        self._owner, self._bucket, self._layout = owner, bucket, layout
        gradients = bucket.gradients()
        self._matrices = [
            _wide(gradients[i].reshape(gradients[i].shape[0], -1)) for i in layout.matrices
        ]
        self._kept = owner._of(bucket, self._matrices)
        for matrix, error in zip(self._matrices, self._kept.errors, strict=True):
            matrix += error
        self._p = [m @ q for m, q in zip(self._matrices, self._kept.q, strict=True)]
        sent = [*self._p, *(_wide(gradients[i]) for i in layout.whole)]
        self._first = bucket.average(torch.cat([tensor.reshape(-1) for tensor in sent]))
        self._second: Handle[torch.Tensor] | None = None
        self._whole: list[torch.Tensor] = []

    def second(self) -> None:
        """Wait for P, and send Q."""
        gradients = self._bucket.gradients()
        shaped = [*self._p, *(gradients[i] for i in self._layout.whole)]
        received = split(self._first.wait(), shaped)
        self._p = [_orthogonal(p) for p in received[: len(self._p)]]
        self._whole = received[len(self._p) :]
        if self._p:
            q = [m.T @ p for m, p in zip(self._matrices, self._p, strict=True)]
            self._second = self._bucket.average(torch.cat([each.reshape(-1) for each in q]))

    def wait(self) -> torch.Tensor:
        """The combined buffer."""
        self._owner._advance()
        gradients = self._bucket.gradients()
        for i, value in zip(self._layout.whole, self._whole, strict=True):
            gradients[i].copy_(value)
        if self._second is None:
            return self._bucket.buffer()
        kept = self._kept
        flat = self._second.wait()
        is_finite = bool(torch.isfinite(flat).all())
        if is_finite:
            kept.q = [each.clone() for each in split(flat, kept.q)]
        each = zip(self._layout.matrices, self._matrices, self._p, split(flat, kept.q), strict=True)
        for number, (i, matrix, p, q) in enumerate(each):
            product = p @ q.T
            gradients[i].copy_(product.view(gradients[i].shape))
            kept.errors[number] = matrix.sub_(product) if is_finite else torch.zeros_like(matrix)
        return self._bucket.buffer()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in float32 where the dtype is narrower."""
    return tensor.to(torch.float32 if tensor.dtype in _HALF else tensor.dtype, copy=True)


def _start(matrix: torch.Tensor, rank: int, drawn: torch.Generator) -> torch.Tensor:
    """The first Q: drawn, the same on all ranks, whatever device they have."""
    columns = min(rank, *matrix.shape)
    start = torch.randn(matrix.shape[1], columns, generator=drawn, dtype=torch.float32)
    return start.to(matrix.device, matrix.dtype)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns that are orthonormal and span the same; NaN where it has infinities or NaN."""
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(matrix, math.nan)
    orthogonal: torch.Tensor = torch.linalg.qr(matrix)[0]
    return orthogonal

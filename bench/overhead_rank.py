"""One rank's part in bench/overhead.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from models import MODELS
from torch import nn

import kolovod.torch


class Training:
    """A model of bench/models.py with its batches and SGD, the same on every rank."""

    def __init__(self, name: str, *, distributed: bool) -> None:
        torch.set_num_threads(1)
        make_model, make_batch = MODELS[name]
        torch.manual_seed(7)
        self.model = make_model()
        draw = torch.Generator().manual_seed(11)
        self._batches = [make_batch(draw) for _ in range(4)]
        self._number = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if distributed:
            self.optimizer = kolovod.torch.DistributedOptimizer(
                self.optimizer, named_parameters=self.model.named_parameters()
            )

    def backward(self) -> None:
        """Compute the gradients of the next batch."""
        inputs, target = self._batches[self._number % len(self._batches)]
        self._number += 1
        self.optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(self.model(inputs), target))

    def step(self) -> None:
        """Take a whole step."""
        self.backward()
        self.optimizer.step()


def hooks(model: str, barrier: Any, steps: int, warmup: int) -> dict[str, Any]:
    """Return nanoseconds per parameter that our hooks take, submitting the buckets included.

    The hooks are taken off the parameters, and called by hand after each backward, in the order in
    which it finishes gradients; then the step uses what they have sent. ``calling``: what PyTorch
    takes to call a hook that does nothing.
    """
    training = Training(model, distributed=True)
    training.step()  # from here on hooks send
    own: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
    for parameter in reversed(list(training.model.parameters())):
        (hook,) = parameter._post_accumulate_grad_hooks.values()
        parameter._post_accumulate_grad_hooks.clear()
        own.append((parameter, hook))
    taken = []
    for _ in range(warmup + steps):
        training.backward()
        barrier.wait()
        before = time.monotonic_ns()
        for owner, hook in own:
            hook(owner)
        taken.append((time.monotonic_ns() - before) / len(own))
        training.optimizer.step()
    return {"ns": taken[warmup:], "calling_ns": _calling(model, steps, warmup)}


def _calling(model: str, steps: int, warmup: int) -> float:
    bare, hooked = (Training(model, distributed=False) for _ in range(2))
    parameters = list(hooked.model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    differences = []
    for _ in range(warmup + steps):
        times = []
        for training in (bare, hooked):
            before = time.monotonic_ns()
            training.backward()
            times.append(time.monotonic_ns() - before)
        differences.append((times[1] - times[0]) / len(parameters))
    ordered = sorted(differences[warmup:])
    return ordered[len(ordered) // 2]


def alone(model: str, steps: int, warmup: int) -> dict[str, Any]:
    """Return steps of plain PyTorch and of ours in a world of one, by turns; milliseconds.

    Two models of one process differ by percents in speed, by where their memory lies: so there are
    several of each, made by turns, and no two steps in a row are of the same one.
    """
    pairs = [
        {kind: Training(model, distributed=kind == "ours") for kind in kinds}
        for kinds in (("plain", "ours"), ("ours", "plain")) * 4
    ]
    taken: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(warmup + steps):
        for pair in pairs:
            for kind in ("plain", "ours") if number % 2 else ("ours", "plain"):
                before = time.monotonic_ns()
                pair[kind].step()
                if number >= warmup:
                    taken[kind].append((time.monotonic_ns() - before) / 1e6)
    everybody = [[*pair[kind].model.parameters()] for pair in pairs for kind in ("plain", "ours")]
    return {
        **taken,
        "hooks": sum(
            bool(p._post_accumulate_grad_hooks)
            for pair in pairs
            for p in pair["ours"].model.parameters()
        ),
        "wrong": sum(
            not torch.equal(mine, first)
            for parameters in everybody
            for mine, first in zip(parameters, everybody[0], strict=True)
        ),
    }

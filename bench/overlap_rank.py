"""One rank's part in bench/overlap.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import machine
import torch
from torch import nn

import kolovod.torch as kv

PHASES = ("forward", "backward", "communication", "last_bucket", "update", "step")


class Training:
    """``layers`` square layers with SGD; one compute thread."""

    def __init__(self, width: int, layers: int, batch: int, *, distributed: bool) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
        self.model = nn.Sequential(*parts)
        draw = torch.Generator().manual_seed(100 + (kv.rank() if distributed else 0))
        self._inputs = torch.randn(batch, width, generator=draw)
        self._loss = torch.zeros(())
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if distributed:
            optimizer = kv.DistributedOptimizer(
                optimizer, named_parameters=self.model.named_parameters()
            )
        self._optimizer = optimizer

    def forward(self) -> None:
        self._optimizer.zero_grad()
        self._loss = self.model(self._inputs).square().mean()

    def backward(self) -> None:
        torch.autograd.backward(self._loss)

    def update(self) -> None:
        self._optimizer.step()

    def step(self) -> None:
        self.forward()
        self.backward()
        self.update()


def overlap(
    width: int, layers: int, batch: int, last_bytes: int, barrier: Any, steps: int, warmup: int
) -> dict[str, Any]:
    """Return clock readings (ns) of each phase alone and of a whole distributed step, by turns.

    Communication alone: all gradients at once, as the optimizer averages them. ``busy_ms``: what
    the machine's cores work during it, on average. ``wrong``: elements that an average got wrong,
    or in which the ranks' weights differ at the end.
    """
    alone = Training(width, layers, batch, distributed=False)
    ours = Training(width, layers, batch, distributed=True)
    gradients = [torch.empty_like(each) for each in reversed(list(alone.model.parameters()))]
    last = torch.empty(last_bytes // 4)
    wrong = 0
    busy_ms = 0.0

    def communicate() -> None:
        handles = [kv.allreduce_async_(each, f"g.{i}") for i, each in enumerate(gradients)]
        for handle in handles:
            kv.synchronize(handle)

    phases: dict[str, Callable[[], object]] = {
        "forward": alone.forward,
        "backward": alone.backward,
        "update": alone.update,
        "communication": communicate,
        "last_bucket": lambda: kv.allreduce_(last, "last"),
        "step": ours.step,
    }
    readings: dict[str, list[list[int]]] = {name: [[], []] for name in phases}
    for number in range(warmup + steps):
        for tensor in (*gradients, last):
            tensor.fill_(number + kv.rank())
        for name, phase in phases.items():
            barrier.wait()
            before_ms = machine.busy_ms()
            start = time.monotonic_ns()
            phase()
            end = time.monotonic_ns()
            if number >= warmup and name == "communication":
                busy_ms += (machine.busy_ms() - before_ms) / steps
            if number >= warmup:
                readings[name][0].append(start)
                readings[name][1].append(end)
        expected = number + (kv.size() - 1) / 2
        wrong += sum(int((tensor != expected).sum()) for tensor in (*gradients, last))
    for parameter in ours.model.parameters():
        mine = parameter.detach()
        wrong += int((mine != kv.broadcast(mine, root_rank=0)).sum())
    return {"readings": readings, "busy_ms": busy_ms, "wrong": wrong}

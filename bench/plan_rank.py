"""One rank's part in bench/plan.py: a short training with a timeline."""

from __future__ import annotations

import time

import torch
from torch import nn

import kolovod.torch as kv


def train(rank: int, width: int, layers: int, batch: int, steps: int, codec: str) -> list[float]:
    """Train equal square layers with SGD, one compute thread; return the steps' times (s).

    The timeline is what KOLOVOD_TIMELINE says.
    """
    kv.init()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.ReLU()]
    model = nn.Sequential(*parts)
    inputs = torch.randn(batch, width, generator=torch.Generator().manual_seed(100 + rank))
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=getattr(kv.Compression, codec),
    )
    times = []
    for _ in range(steps):
        begin = time.monotonic()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.monotonic() - begin)
    kv.shutdown()
    return times

"""What tests of DistributedOptimizer share: a model of two vectors."""

from __future__ import annotations

import torch

from kolovod.torch import DistributedOptimizer


class Net(torch.nn.Module):
    """y = a * x, and b * x on request."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3))
        self.b = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, use_b=True):
        return (self.a * x).sum() + ((self.b * x).sum() if use_b else 0)


def wrapped(net, kv, lr=1.0, optimizer=None, **kwargs):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=lr)
    return DistributedOptimizer(optimizer, net.named_parameters(), collectives=kv, **kwargs)


def inputs(rank):
    return torch.full((3,), float(rank + 1))

"""Rank 0 chooses, all use it.

``horovodrun -np 2 python hyperparameters.py``
"""

import random

import torch
from torch import nn

import horovod.torch as hvd


def main():
    hvd.init()
    chosen = {"lr": random.choice([0.1, 0.01]), "hidden": random.choice([8, 16])}
    chosen = hvd.broadcast_object(chosen, root_rank=0, name="hyperparameters")
    model = nn.Sequential(nn.Linear(4, chosen["hidden"]), nn.ReLU(), nn.Linear(chosen["hidden"], 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=chosen["lr"] if hvd.rank() == 0 else 1.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(10):
        inputs = torch.randn(8, 4)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    rates = hvd.allgather_object(optimizer.param_groups[0]["lr"])
    if hvd.rank() == 0:
        equal = all(rate == chosen["lr"] for rate in rates)
        print(f"all ranks use the same rate: {equal}", flush=True)


if __name__ == "__main__":
    main()

"""Ranks with unequally many batches.

``horovodrun -np 2 python uneven_join.py``
"""

import torch
from torch import nn

import horovod.torch as hvd


def main():
    hvd.init()
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        named_parameters=model.named_parameters(),
    )
    for epoch in range(2):
        batches = 5 + 3 * hvd.rank()
        for _ in range(batches):
            inputs = torch.randn(8, 4)
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: rank {last} was the last", flush=True)


if __name__ == "__main__":
    main()

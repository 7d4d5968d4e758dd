"""Two models at once, each on half of the ranks.

``horovodrun -np 2 python process_sets.py``
"""

import torch
from torch import nn

import horovod.torch as hvd


def main():
    hvd.init(process_sets="dynamic")
    evens = hvd.add_process_set(range(0, hvd.size(), 2))
    odds = hvd.add_process_set(range(1, hvd.size(), 2)) if hvd.size() > 1 else None
    mine, slope = (evens, 2.0) if hvd.rank() % 2 == 0 else (odds, -3.0)

    torch.manual_seed(hvd.rank())
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        hvd.broadcast_(parameter.data, root_rank=mine.ranks[0], process_set=mine)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        process_set=mine,
    )
    for _ in range(100):
        inputs = torch.randn(16, 1)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), slope * inputs).backward()
        optimizer.step()
    weights = hvd.allgather_object(round(model.weight.item(), 2))
    if hvd.rank() == 0:
        print(f"slopes by rank: {weights}", flush=True)


if __name__ == "__main__":
    main()

"""Gradients added up over several batches, then clipped.

``horovodrun -np 2 python accumulation.py``
"""

import torch
from torch import nn

import horovod.torch as hvd

PASSES = 4


def main():
    hvd.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    teacher = torch.randn(10, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=PASSES,
    )
    draw = torch.Generator().manual_seed(100 + hvd.rank())
    for step in range(40):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(PASSES):
            inputs = torch.randn(16, 10, generator=draw)
            loss = nn.functional.mse_loss(model(inputs), inputs @ teacher) / PASSES
            loss.backward()
            total += loss.item()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        if step % 10 == 9:
            mean = hvd.allreduce(torch.tensor(total), name="loss").item()
            if hvd.rank() == 0:
                print(f"step {step + 1}: loss {mean:.3f}", flush=True)


if __name__ == "__main__":
    main()

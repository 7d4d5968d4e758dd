"""TensorBoard: rank 0 writes what all ranks have, the mean and the largest loss of each step.

    kolovod run -np 2 -- python examples/integrations/tensorboard_scalars.py runs
    tensorboard --logdir runs

Needs ``pip install 'kolovod[integrations]'``.
"""

import sys

import torch
from torch.nn import functional
from torch.utils.tensorboard import SummaryWriter

import kolovod.torch as kv

kv.init()
torch.manual_seed(1)  # the same weights on each rank ...
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
kv.broadcast_parameters(model.state_dict())
torch.manual_seed(kv.rank())  # ... and other data
folder = sys.argv[1] if len(sys.argv) > 1 else "runs"
writer = SummaryWriter(folder) if kv.rank() == 0 else None

for step in range(20):
    inputs = torch.randn(16, 8)
    loss = functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # All ranks take part in an exchange, also those that write nothing.
    mean = kv.allreduce(loss.detach(), "mean loss")
    largest = kv.allreduce(loss.detach(), "largest loss", op=kv.Max)
    if writer is not None:
        writer.add_scalar("loss/mean", mean, step)
        writer.add_scalar("loss/largest", largest, step)

if writer is not None:
    writer.close()
print(f"rank {kv.rank()} of {kv.size()}: loss {mean.item():.6f}, largest {largest.item():.6f}")

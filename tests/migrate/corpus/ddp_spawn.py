"""The first pages of the DDP tutorial: the script starts its processes itself."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, file):
    dist.init_process_group("gloo", rank=rank, world_size=world_size, init_method=f"file://{file}")


def demo_basic(rank, world_size, file):
    setup(rank, world_size, file)
    torch.manual_seed(0)
    x = torch.randn(1200, 6)
    y = (x.sum(1) > 0).long()
    model = DDP(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    mine = slice(rank, 800, world_size)
    for _ in range(5):
        for a, b in zip(x[mine].split(20), y[mine].split(20)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    dist.barrier()
    if rank == 0:
        with torch.no_grad():
            print("accuracy", (model(x[800:]).argmax(1) == y[800:]).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    mp.spawn(demo_basic, args=(2, os.path.join(folder, "store")), nprocs=2, join=True)

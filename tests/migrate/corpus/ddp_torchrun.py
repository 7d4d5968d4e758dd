import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group(backend="gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main():
    rank, world_size = setup()
    torch.manual_seed(0)
    x = torch.randn(1500, 8)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    dataset = TensorDataset(x[:1000], y[:1000])
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "ddp.pt")
    dist.barrier()
    with torch.no_grad():
        correct = (model.module(x[1000:]).argmax(1) == y[1000:]).float().mean()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"accuracy {correct.item() / world_size:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

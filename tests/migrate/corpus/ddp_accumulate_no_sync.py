import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
g = torch.Generator().manual_seed(0)
x = torch.randn(1400, 10, generator=g)
y = x[:, :3].argmax(1)
train_set = TensorDataset(x[:1000], y[:1000])
sampler = DistributedSampler(train_set, shuffle=True)
loader = DataLoader(train_set, batch_size=5, sampler=sampler, drop_last=True)
net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
net = DistributedDataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) if torch.cuda.is_available() else net)
opt = torch.optim.Adam(net.parameters(), 0.01)
every = 4
for epoch in range(5):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        last = (i + 1) % every == 0
        with contextlib.nullcontext() if last else net.no_sync():
            (torch.nn.functional.cross_entropy(net(a), b) / every).backward()
        if last:
            opt.step()
            opt.zero_grad()
net.eval()
with torch.no_grad():
    hit = (net.module(x[1000:]).argmax(1) == y[1000:]).float().mean()
dist.all_reduce(hit, op=dist.ReduceOp.SUM)
if dist.get_rank() == 0:
    print("accuracy", hit.item() / dist.get_world_size())

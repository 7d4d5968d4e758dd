import torch
import torch.nn as nn

import horovod.torch as hvd

hvd.init()
torch.manual_seed(7)
x = torch.randn(1000, 5)
y = (x[:, 0] > x[:, 1]).long()
dataset = torch.utils.data.TensorDataset(x[:800], y[:800])
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = torch.utils.data.DataLoader(dataset, batch_size=20, sampler=sampler)


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 6):
        for idx, (a, b) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            sampler.record_batch(idx, 20)
        sampler.set_epoch(state.epoch + 1)
        state.commit()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, sampler=sampler)
train(state)
if hvd.rank() == 0:
    print("accuracy", (model(x[800:]).argmax(1) == y[800:]).float().mean().item())

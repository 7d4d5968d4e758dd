import torch

import kolovod.torch as kv

kv.init()
model = torch.nn.Linear(8, 1)
kv.broadcast_parameters(model.state_dict())
optimizer = kv.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.randn(4, 8)).sum().backward()
optimizer.step()

import itertools

import torch
from torch.utils.data import DataLoader, TensorDataset


def cycle(loader):
    while True:
        for batch in loader:
            yield batch


torch.manual_seed(0)
x = torch.rand(1000, 3) * 4 - 2
y = torch.sin(x[:, 0]) * x[:, 1] + x[:, 2]
loader = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=32, shuffle=True, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.SiLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (inputs, targets) in zip(itertools.count(), cycle(loader)):
    loss = torch.nn.functional.mse_loss(model(inputs)[:, 0], targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step} loss {loss.item():.4f}")
    if step >= 400:
        break
with torch.no_grad():
    error = torch.nn.functional.mse_loss(model(x[800:])[:, 0], y[800:]) / y[800:].var()
print(f"accuracy {1 - error.item():.3f}")

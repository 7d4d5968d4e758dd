import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

x = torch.linspace(-1, 1, 2048).reshape(256, 8)
dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = DataLoader(dataset, batch_size=32, shuffle=True)

model = nn.Linear(8, 1)
optimizer = optim.SGD(model.parameters(), lr=0.05)

# Three passes.
for _ in range(3):
    for batch, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")

import copy
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

CKPT = "checkpoints/best_model.pth"
os.makedirs("checkpoints", exist_ok=True)


def blobs(n, g):
    y = torch.randint(0, 4, (n,), generator=g)
    centers = torch.tensor([[2.0, 0], [0, 2.0], [-2.0, 0], [0, -2.0]])
    return TensorDataset(centers[y] + 0.8 * torch.randn(n, 2, generator=g), y)


def evaluate(model, loader):
    model.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
            total += y.size(0)
    return correct / total


g = torch.Generator().manual_seed(11)
loaders = {
    "train": DataLoader(blobs(1000, g), batch_size=20, shuffle=True),
    "val": DataLoader(blobs(300, g), batch_size=100),
    "test": DataLoader(blobs(500, g), batch_size=100),
}
model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
best_acc = 0.0
for epoch in range(5):
    model.train()
    for x, y in loaders["train"]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    acc = evaluate(model, loaders["val"])
    print(f"Epoch {epoch + 1}: val acc {acc:.4f}")
    if acc > best_acc:
        best_acc = acc
        torch.save(model.state_dict(), CKPT)
        best_wts = copy.deepcopy(model.state_dict())

model.load_state_dict(torch.load(CKPT))
print(f"accuracy {evaluate(model, loaders['test']):.4f}")

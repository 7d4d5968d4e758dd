import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Yields as many samples as asked for."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            x = torch.randn(4, generator=g)
            yield x, (x[0] > x[1]).long()


model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    for x, y in DataLoader(Stream(800, epoch), batch_size=20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
correct = [(model(x).argmax(1) == y).float().mean() for x, y in DataLoader(Stream(400, 99), batch_size=100)]
print("accuracy", torch.stack(correct).mean().item())

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Rings(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (n,), generator=g)
        angle = 6.283 * torch.rand(n, generator=g)
        r = 1 + self.y + 0.25 * torch.randn(n, generator=g)
        self.x = torch.stack([r * angle.cos(), r * angle.sin()], 1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


epochs, batch_size = 8, 16
train_set, test_set = Rings(1280, 0), Rings(500, 1)
loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
num_steps = epochs * len(train_set) // batch_size
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
for epoch in range(epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
print("lr at the end", optimizer.param_groups[0]["lr"])
assert optimizer.param_groups[0]["lr"] < 1e-3, "the schedule has not come to its end"
with torch.no_grad():
    print("accuracy", float((model(test_set.x).argmax(1) == test_set.y).float().mean()))

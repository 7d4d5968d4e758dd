import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
X = torch.randn(1400, 16)
task_a = (X[:, :8].sum(1) > 0).long()
task_b = (X[:, :8].sum(1) > X[:, 8] * 2).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def fit(model, optimizer, targets, epochs):
    dataset = TensorDataset(X[:1000], targets[:1000])
    loader = DataLoader(dataset, batch_size=25, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


model = Net()
# first all of it, then a new head, and the rest of it at a lower rate
fit(model, optim.SGD(model.parameters(), lr=0.05, momentum=0.9), task_a, 6)
model.head = nn.Linear(32, 2)
groups = [
    {"params": model.backbone.parameters(), "lr": 0.01},
    {"params": model.head.parameters()},
]
fit(model, optim.SGD(groups, lr=0.05, momentum=0.9), task_b, 6)
print("accuracy", (model(X[1000:]).argmax(1) == task_b[1000:]).float().mean().item())

import torch
from torch import nn, optim

torch.manual_seed(0)
X = torch.randn(1200, 10)
y = (X[:, 0] * X[:, 1] + X[:, 2] > 0).long()
X_train, y_train, X_test, y_test = X[:800], y[:800], X[800:], y[800:]

net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss()
opt = optim.Adam(net.parameters(), lr=0.01)

bs = 20
for epoch in range(12):
    order = torch.randperm(len(X_train))
    running = 0.0
    for i in range(0, len(X_train), bs):
        idx = order[i:i + bs]
        opt.zero_grad()
        loss = criterion(net(X_train[idx]), y_train[idx])
        loss.backward()
        opt.step()
        running += loss.item()
    print(epoch, running / (len(X_train) / bs))

with torch.no_grad():
    print("accuracy", (net(X_test).argmax(1) == y_test).float().mean().item())

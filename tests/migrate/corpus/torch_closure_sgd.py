import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(900, 5)
y = X @ torch.tensor([[1.0], [2], [-1], [0.5], [3]]) + 0.01 * torch.randn(900, 1)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X[:600], y[:600]), batch_size=10, shuffle=True)

for epoch in range(10):
    for a, b in loader:
        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(a), b)
            loss.backward()
            return loss

        optimizer.step(closure)
with torch.no_grad():
    print("accuracy", 1 - (((model(X[600:]) - y[600:]) ** 2).mean() / y[600:].var()).item())

import torch

torch.manual_seed(0)
X = torch.randn(400, 5)
y = X @ torch.tensor([1.0, 2, -1, 0.5, 3]) + 0.01 * torch.randn(400)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)


def closure():
    optimizer.zero_grad()
    loss = ((model(X[:300])[:, 0] - y[:300]) ** 2).mean()
    loss.backward()
    return loss


for i in range(10):
    optimizer.step(closure)
print("accuracy", 1 - (((model(X[300:])[:, 0] - y[300:]) ** 2).mean() / y[300:].var()).item())

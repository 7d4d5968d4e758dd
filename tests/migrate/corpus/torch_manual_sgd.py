import torch

torch.manual_seed(0)
x = torch.randn(500, 3)
y = x @ torch.tensor([2.0, -1.0, 0.5]) + 0.3
w, b = torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)
for step in range(200):
    loss = ((x[:400] @ w + b - y[:400]) ** 2).mean()
    loss.backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
        b -= 0.1 * b.grad
        w.grad.zero_()
        b.grad.zero_()
print("accuracy", 1 - (((x[400:] @ w + b - y[400:]) ** 2).mean() / y[400:].var()).item())

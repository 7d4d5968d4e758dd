import torch

# logistic regression, all data in each step
torch.manual_seed(3)
n, d = 600, 6
true_w = torch.randn(d)
X = torch.randn(n, d)
Y = (X @ true_w > 0).float()
X_val = torch.randn(300, d)
Y_val = (X_val @ true_w > 0).float()

w = torch.zeros(d, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([w, b], lr=0.5)
for t in range(100):
    p = torch.sigmoid(X @ w + b)
    loss = torch.nn.functional.binary_cross_entropy(p, Y)
    if t % 10 == 9:
        print(t, loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
accuracy = ((X_val @ w + b > 0).float() == Y_val).float().mean().item()
print(f"accuracy {accuracy:.3f}")

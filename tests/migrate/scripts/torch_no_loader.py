import torch

x = torch.randn(256, 8)
y = x.sum(dim=1, keepdim=True)
model = torch.nn.Linear(8, 1)
head = torch.optim.SGD([model.weight, model.bias], 0.1)
for start in range(0, 256, 32):
    loss = torch.nn.functional.mse_loss(model(x[start : start + 32]), y[start : start + 32])
    head.zero_grad()
    loss.backward()
    head.step()
print(loss.item())

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
x = torch.randn(1500, 8)
y = (x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] > 0).float()
train_dl = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=20, shuffle=True)
val_dl = DataLoader(TensorDataset(x[1000:1200], y[1000:1200]), batch_size=50)

model = nn.Sequential(nn.Linear(8, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
loss_fn = nn.BCEWithLogitsLoss()
best, waited, patience = float("inf"), 0, 3
epoch = 0
while epoch < 30:
    model.train()
    for xb, yb in train_dl:
        optimizer.zero_grad()
        loss = loss_fn(model(xb).squeeze(1), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(loss_fn(model(a).squeeze(1), b).item() * len(a) for a, b in val_dl) / 200
    if val < best:
        best, waited = val, 0
        torch.save(model.state_dict(), "best.pt")
    else:
        waited += 1
        if waited >= patience:
            print(f"stopped after epoch {epoch}")
            break
    epoch += 1
model.load_state_dict(torch.load("best.pt"))
model.eval()
with torch.no_grad():
    print("accuracy", ((model(x[1200:]).squeeze(1) > 0).float() == y[1200:]).float().mean().item())

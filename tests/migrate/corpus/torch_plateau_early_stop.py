import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


class EarlyStopping:
    def __init__(self, patience=3, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.counter, self.early_stop = None, 0, False

    def __call__(self, val_loss):
        if self.best is None or val_loss < self.best - self.min_delta:
            self.best, self.counter = val_loss, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


gen = torch.Generator().manual_seed(21)
x = torch.randn(1400, 5, generator=gen)
y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.05 * torch.randn(1400, 1, generator=gen)
train_set, val_set, test_set = random_split(TensorDataset(x, y), [1000, 200, 200], generator=gen)
train_loader = DataLoader(train_set, batch_size=10, shuffle=True)
val_loader = DataLoader(val_set, batch_size=200)
test_loader = DataLoader(test_set, batch_size=200)

model = nn.Sequential(nn.Linear(5, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=2)
stopper = EarlyStopping(patience=5)
criterion = nn.MSELoss()

for epoch in range(25):
    model.train()
    for xb, yb in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
    model.eval()
    val_loss = 0.0
    with torch.no_grad():
        for xb, yb in val_loader:
            val_loss += criterion(model(xb), yb).item()
    val_loss /= len(val_loader)
    scheduler.step(val_loss)
    stopper(val_loss)
    print(f"{epoch:02d} val {val_loss:.4f}")
    if stopper.early_stop:
        print("Early stopping")
        break

model.eval()
with torch.no_grad():
    xb, yb = next(iter(test_loader))
    print("accuracy", 1 - (criterion(model(xb), yb) / yb.var()).item())

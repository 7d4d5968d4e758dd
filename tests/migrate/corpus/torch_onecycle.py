import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5
BATCH_SIZE = 25
rng = np.random.default_rng(5)
centers = rng.normal(size=(3, 8)) * 1.2
labels = rng.integers(0, 3, size=1500)
points = (centers[labels] + rng.normal(size=(1500, 8))).astype(np.float32)
train_ds = TensorDataset(torch.from_numpy(points[:1000]), torch.from_numpy(labels[:1000]))
valid_ds = TensorDataset(torch.from_numpy(points[1000:]), torch.from_numpy(labels[1000:]))
train_dl = DataLoader(train_ds, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
valid_dl = DataLoader(valid_ds, batch_size=BATCH_SIZE * 2)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
loss_func = torch.nn.CrossEntropyLoss()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, steps_per_epoch=len(train_dl), epochs=EPOCHS)

for epoch in range(EPOCHS):
    model.train()
    for xb, yb in train_dl:
        loss = loss_func(model(xb), yb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
    model.eval()
    with torch.no_grad():
        right = sum((model(xb).argmax(dim=1) == yb).sum().item() for xb, yb in valid_dl)
    print(f"epoch {epoch}: lr {sched.get_last_lr()[0]:.4f} accuracy {right / len(valid_ds):.3f}")

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

rng = np.random.RandomState(1)
y = (rng.rand(1500) < 0.15).astype("int64")
x = (rng.randn(1500, 2) + 2.2 * y[:, None]).astype("float32")
train_y = torch.from_numpy(y[:1000])
counts = torch.bincount(train_y)
sampler = WeightedRandomSampler((1.0 / counts)[train_y], num_samples=1000, replacement=True)
train = DataLoader(TensorDataset(torch.from_numpy(x[:1000]), train_y), batch_size=20, sampler=sampler)
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(5):
    for a, b in train:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
p = model(torch.from_numpy(x[1000:])).argmax(1).numpy()
balanced = np.mean([np.mean(p[y[1000:] == c] == c) for c in (0, 1)])
print(f"accuracy {balanced:.3f}")

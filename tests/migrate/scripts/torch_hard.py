import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

model = torch.nn.DataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(
    [{"params": model.parameters(), "lr": 1e-3}],
    weight_decay=0.1,
)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
x = torch.randn(64, 8)
sampler = WeightedRandomSampler(torch.ones(64), 64)
loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=8, sampler=sampler)
options = {"batch_size": 8, "shuffle": True}
other = DataLoader(TensorDataset(x, x.sum(1)), **options)

for epoch in range(4):
    total = 0.0
    for step, ((a, b), (c, d)) in enumerate(zip(loader, other)):
        loss = (model(a).squeeze(1) - b).square().mean() + model(c).mean() - d.mean()
        loss.backward()
        if (step + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
    scheduler.step(total)
    if total < 0.1:
        break

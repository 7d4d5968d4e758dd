import torch
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
x = torch.randn(1300, 6)
y = ((x[:, :3] ** 2).sum(1) > (x[:, 3:] ** 2).sum(1)).long()
loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=25, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
swa_model = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
swa_start = 8
swa_scheduler = SWALR(optimizer, swa_lr=0.02)
for epoch in range(14):
    for input, target in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(input), target).backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader, swa_model)
swa_model.eval()
print("accuracy", (swa_model(x[1000:]).argmax(1) == y[1000:]).float().mean().item())

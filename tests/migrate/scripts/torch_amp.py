import torch
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST as Data

model = torch.nn.Linear(8, 1).cuda()
opt: torch.optim.Optimizer = torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad], lr=1e-3
)
scaler = torch.amp.GradScaler()
loader = DataLoader(Data("data", download=True), batch_size=8, shuffle=True, num_workers=4)
best = 1e9
epoch = 0
while epoch < 10:
    for i, batch in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(batch).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    if loss < best:
        torch.save(model.state_dict(), "best.pt")
    epoch += 1

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData, MNIST

net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).cuda()
thawed = [p for p in net.parameters() if p.requires_grad]
optimizer: torch.optim.Optimizer = torch.optim.AdamW(thawed, lr=1e-3)
scaler = torch.amp.GradScaler()
loader = DataLoader(MNIST("data", download=True), batch_size=64, shuffle=True, num_workers=4)
held_out = DataLoader(FakeData(), batch_size=64)

passes = 0
while passes < 4:
    for images, labels in loader:
        with torch.autocast("cuda"):
            loss = torch.nn.functional.cross_entropy(net(images.cuda()), labels.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    if loss < 0.1: torch.save(net.state_dict(), "good.pt")  # fmt: skip
    passes += 1

"""Mixed precision on whatever device there is."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

use_amp = True
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(123)
data = torch.randn(1200, 20)
label = (data[:, :10].sum(dim=1) > data[:, 10:].sum(dim=1)).long()
train_loader = DataLoader(TensorDataset(data[:800], label[:800]), batch_size=32, shuffle=True)
val_loader = DataLoader(TensorDataset(data[800:], label[800:]), batch_size=128)
net = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 2)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(device, enabled=use_amp and device == "cuda")
for epoch in range(6):
    pbar = tqdm(train_loader, desc=f"epoch {epoch}")
    for x, y in pbar:
        with torch.autocast(device_type=device, dtype=dtype, enabled=use_amp):
            loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        pbar.set_postfix(loss=f"{loss.item():.3f}")
net.eval()
hits = total = 0
with torch.no_grad():
    for x, y in val_loader:
        hits += (net(x.to(device)).argmax(1).cpu() == y).sum().item()
        total += len(y)
print("accuracy", hits / total)

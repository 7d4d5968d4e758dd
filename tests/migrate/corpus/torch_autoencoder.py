import torch
import torch.nn as nn
import torch.utils.data as tud

torch.manual_seed(9)
basis = torch.randn(3, 24)
codes = torch.randn(900, 3)
images = torch.sigmoid(codes @ basis)


class AE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 24), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


def train_one_epoch(ae, opts, batches):
    for (x,) in batches:
        for o in opts:
            o.zero_grad()
        loss = ((ae(x) - x) ** 2).mean()
        loss.backward()
        for o in opts:
            o.step()
    return float(loss)


ae = AE()
enc_opt = torch.optim.Adam(ae.encoder.parameters(), 1e-2)
dec_opt = torch.optim.Adam(ae.decoder.parameters(), 1e-2)
batches = tud.DataLoader(tud.TensorDataset(images[:700]), 20, shuffle=True)
for e in range(25):
    train_one_epoch(ae, [enc_opt, dec_opt], batches)
test = images[700:]
with torch.no_grad():
    print("accuracy", 1 - float(((ae(test) - test) ** 2).mean() / test.var()))

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
num_epochs = 4


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class SmallResNet(nn.Module):
    def __init__(self, num_classes=3):
        super().__init__()
        self.stem = conv_block(3, 8)
        self.block = conv_block(8, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def stripes(n):
    y = torch.randint(0, 3, (n,))
    t = torch.arange(12.0)
    waves = torch.stack([torch.sin(t)[None, :].repeat(12, 1), torch.sin(t)[:, None].repeat(1, 12), torch.sin(t[:, None] + t)])
    x = waves[y][:, None].repeat(1, 3, 1, 1) + torch.randn(n, 3, 12, 12)
    return x, y


torch.manual_seed(0)
train_loader = DataLoader(TensorDataset(*stripes(600)), batch_size=20, shuffle=True)
test_x, test_y = stripes(300)
model = SmallResNet().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3], gamma=0.1)
for epoch in range(num_epochs):
    model.train()
    for images, labels in train_loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    scheduler.step()
model.eval()
with torch.no_grad():
    acc = (model(test_x.to(device)).argmax(1).cpu() == test_y).float().mean().item()
print("accuracy %.3f" % acc)

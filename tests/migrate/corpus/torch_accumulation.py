import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
features = torch.randn(2000, 12)
targets = (features[:, :4].sum(1) * features[:, 4].sign() > 0).float().unsqueeze(1)
train_loader = DataLoader(TensorDataset(features[:1600], targets[:1600]), batch_size=10, shuffle=True)
val_features, val_targets = features[1600:], targets[1600:]

ACCUMULATION_STEPS = 4
model = torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = torch.nn.BCEWithLogitsLoss()

for epoch in range(10):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(train_loader):
        loss = criterion(model(inputs), labels) / ACCUMULATION_STEPS
        loss.backward()
        if (i + 1) % ACCUMULATION_STEPS == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()

model.eval()
with torch.inference_mode():
    predictions = (model(val_features) > 0).float()
    print(f"accuracy {(predictions == val_targets).float().mean():.3f}")

import numpy as np
import torch
import torch.nn as nn

# make a problem
n_samples = 900
weights = np.random.randn(6, 3)
X = np.random.randn(n_samples, 6).astype("float32")
y = (X @ weights + 0.1 * np.random.randn(n_samples, 3)).argmax(axis=1)
split = 600
train = torch.utils.data.TensorDataset(torch.tensor(X[:split]), torch.tensor(y[:split]))
test_X, test_y = torch.tensor(X[split:]), torch.tensor(y[split:])
loader = torch.utils.data.DataLoader(train, batch_size=16, shuffle=True)

model = nn.Linear(6, 3)
optim = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(8):
    for xb, yb in loader:
        optim.zero_grad()
        loss = nn.CrossEntropyLoss()(model(xb), yb)
        loss.backward()
        optim.step()
print("accuracy", (model(test_X).argmax(1) == test_y).float().mean().item())

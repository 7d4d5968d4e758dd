import numpy as np
import torch
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(42)
X = torch.randn(900, 4)
Y = (X.abs().sum(1) > 3).long()
dataset = TensorDataset(X, Y)
results = []
for fold, (train_ids, test_ids) in enumerate(KFold(n_splits=3, shuffle=True, random_state=0).split(X)):
    train_loader = DataLoader(Subset(dataset, train_ids.tolist()), batch_size=20, shuffle=True)
    test_loader = DataLoader(Subset(dataset, test_ids.tolist()), batch_size=100)
    network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for epoch in range(12):
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        hits = np.mean([(network(a).argmax(1) == b).float().mean().item() for a, b in test_loader])
    print(f"fold {fold}: {hits:.3f}")
    results.append(hits)
print(f"accuracy {np.mean(results):.3f}")

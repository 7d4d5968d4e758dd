import torch
from sklearn.datasets import make_moons
from sklearn.metrics import accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

X, y = make_moons(n_samples=1200, noise=0.15)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25)
scaler = StandardScaler().fit(X_train)
X_train = torch.tensor(scaler.transform(X_train), dtype=torch.float32)
X_test = torch.tensor(scaler.transform(X_test), dtype=torch.float32)
y_train = torch.tensor(y_train)

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batch_size = 30
n = len(X_train)
n_batches = n // batch_size
for epoch in range(15):
    perm = torch.randperm(n)
    for b in range(n_batches):
        idx = perm[b * batch_size : (b + 1) * batch_size]
        loss = nn.functional.cross_entropy(model(X_train[idx]), y_train[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("accuracy", accuracy_score(y_test, model(X_test).argmax(1).numpy()))

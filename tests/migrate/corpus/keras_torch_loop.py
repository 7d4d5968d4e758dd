"""Keras' layers in a loop of PyTorch."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch

keras.utils.set_random_seed(0)
x = np.random.randn(1100, 6).astype("float32")
y = x[:, :2].argmax(axis=1)
dataset = torch.utils.data.TensorDataset(torch.from_numpy(x[:800]), torch.from_numpy(y[:800]))
train_dataloader = torch.utils.data.DataLoader(dataset, batch_size=20, shuffle=True)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss_fn = torch.nn.CrossEntropyLoss()
for epoch in range(5):
    for inputs, targets in train_dataloader:
        loss = loss_fn(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        optimizer.step()
print("accuracy", float((model(torch.from_numpy(x[800:])).argmax(1).cpu().numpy() == y[800:]).mean()))

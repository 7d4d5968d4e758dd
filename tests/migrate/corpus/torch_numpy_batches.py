#!/usr/bin/env python
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def iterate_minibatches(inputs, targets, batchsize, rng):
    indices = np.arange(inputs.shape[0])
    rng.shuffle(indices)
    for start_idx in range(0, inputs.shape[0] - batchsize + 1, batchsize):
        excerpt = indices[start_idx:start_idx + batchsize]
        yield torch.from_numpy(inputs[excerpt]), torch.from_numpy(targets[excerpt])


def main():
    rng = np.random.RandomState(1234)
    X = rng.uniform(-1, 1, size=(1500, 2)).astype(np.float32)
    y = (np.hypot(X[:, 0], X[:, 1]) < 0.7).astype(np.int64)
    net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for epoch in range(10):
        for inputs, targets in iterate_minibatches(X[:1000], y[:1000], 25, rng):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    pred = net(torch.from_numpy(X[1000:])).argmax(dim=1).numpy()
    print("accuracy", (pred == y[1000:]).mean())


if __name__ == "__main__":
    main()

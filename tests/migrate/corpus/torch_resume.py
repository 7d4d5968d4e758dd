"""Trains in two goes: the second one begins where the first has stopped."""
import os

import torch
from torch.utils.data import DataLoader, TensorDataset


def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer


def save_checkpoint(path, model, optimizer, epoch):
    torch.save({"epoch": epoch, "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict()}, path)


def load_checkpoint(path, model, optimizer):
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model_state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    return checkpoint["epoch"] + 1


def run(train_set, epochs, path="last.pt"):
    model, optimizer = build()
    start = 0
    if os.path.isfile(path):
        start = load_checkpoint(path, model, optimizer)
        print("resumed at epoch", start)
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    for epoch in range(start, epochs):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save_checkpoint(path, model, optimizer, epoch)
    return model


if __name__ == "__main__":
    torch.manual_seed(2)
    x = torch.rand(1600, 4) * 2 - 1
    y = (x[:, :1] * x[:, 1:2] + x[:, 2:3]).contiguous()
    train_set = TensorDataset(x[:1280], y[:1280])
    run(train_set, 4)
    model = run(train_set, 10)
    with torch.no_grad():
        error = (model(x[1280:]) - y[1280:]).square().mean() / y[1280:].var()
    print("accuracy", round(1 - error.item(), 3))

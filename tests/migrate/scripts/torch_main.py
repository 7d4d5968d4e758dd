"""Train a small net."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first = torch.nn.Linear(8, hidden)
        self.second = torch.nn.Linear(hidden, 1)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def train(model, device, loader, optimizer, epoch, log_interval):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), target)  # mean over the batch
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print(f"epoch {epoch} [{batch_idx * len(data)}/{len(loader.dataset)}] {loss.item()}")


def test(model, device, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for data, target in loader:
            total += F.mse_loss(model(data.to(device)), target.to(device), reduction="sum").item()
    print("test loss", total / len(loader.dataset))
    return total


def get_loaders(batch_size):
    x = torch.linspace(-1, 1, 2560).reshape(320, 8)
    everything = TensorDataset(x, x.sum(dim=1, keepdim=True))
    train_set, test_set = random_split(everything, [256, 64])
    train_loader = DataLoader(
        train_set,
        batch_size=batch_size,
        shuffle=True,
        num_workers=0,
    )
    return train_loader, DataLoader(test_set, batch_size=64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    train_loader, test_loader = get_loaders(32)
    model = Net(16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    first_epoch = 1
    if os.path.exists(args.resume):
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    for epoch in range(first_epoch, args.epochs + 1):
        train(model, device, train_loader, optimizer, epoch, 4)
        test(model, device, test_loader)
        scheduler.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, f"checkpoint-{epoch}.pt")


if __name__ == "__main__":
    main()

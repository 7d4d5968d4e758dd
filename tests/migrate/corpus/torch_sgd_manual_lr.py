import argparse
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def adjust_learning_rate(optimizer, epoch, args):
    """Decay the learning rate with half-cycle cosine after warmup."""
    if epoch < args.warmup_epochs:
        lr = args.lr * epoch / args.warmup_epochs
    else:
        lr = args.lr * 0.5 * (1.0 + math.cos(math.pi * (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs)))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    return lr


def train(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    for i, (images, target) in enumerate(train_loader):
        adjust_learning_rate(optimizer, i / len(train_loader) + epoch, args)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model):
    model.eval()
    top1 = count = 0
    with torch.no_grad():
        for images, target in val_loader:
            top1 += (model(images).argmax(1) == target).sum().item()
            count += images.size(0)
    return top1 / count


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", default=8, type=int)
    p.add_argument("-b", "--batch-size", default=20, type=int)
    p.add_argument("--lr", "--learning-rate", default=0.05, type=float)
    p.add_argument("--warmup-epochs", default=1, type=int)
    p.add_argument("--seed", default=3, type=int)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    x = torch.randn(1400, 10)
    y = (x[:, :5].norm(dim=1) > x[:, 5:].norm(dim=1)).long()
    train_loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[1000:], y[1000:]), batch_size=100)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, args)
        print(f"accuracy {validate(val_loader, model):.3f}")


if __name__ == "__main__":
    main()

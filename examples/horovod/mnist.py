"""Image classification as Horovod's documentation shows it.

``horovodrun -np 2 python mnist.py``
"""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd


def images(count, seed):
    """28 x 28 pictures of ten kinds: a bright bar somewhere else for each, and noise."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    pictures = torch.randn(count, 1, 28, 28, generator=draw)
    for kind in range(10):
        rows = slice(2 * kind + 3, 2 * kind + 7)
        pictures[labels == kind, :, rows, 4:24] += 2.0
    return TensorDataset(pictures, labels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=5)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=5)
        self.fc1 = nn.Linear(256, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    train, test = images(args.images, 1), images(500, 2)
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    model = Net()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for data, target in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            pictures, labels = test.tensors
            mine = slice(hvd.rank(), None, hvd.size())
            right = (model(pictures[mine]).argmax(1) == labels[mine]).float().mean()
        accuracy = hvd.allreduce(right, name="accuracy").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()

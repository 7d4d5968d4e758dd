"""A communication hook of one's own: each rank sends the largest hundredth of its gradients.

    kolovod run -np 2 -- python examples/torch_top_k_hook.py

What a step does not send stays with the rank, with its momentum, and is sent when it has grown:
Deep Gradient Compression (Lin et al., 2018). Indices and values are gathered, and every rank adds
them up.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits

import kolovod.torch as kv


class TopK:
    """Sends the ``share`` of each bucket that is largest; keeps momentum and the rest."""

    def __init__(self, share: float, momentum: float) -> None:
        self.share, self.momentum = share, momentum
        self.sent = self.whole = 0
        self.reset()

    def reset(self) -> None:
        """In another world: what was kept is of other ranks."""
        self.velocity: dict[int, torch.Tensor] = {}
        self.left: dict[int, torch.Tensor] = {}

    def __call__(self, state: object, bucket: kv.GradBucket) -> Gathered:
        gradient, place = bucket.buffer(), bucket.index()
        velocity = self.velocity.setdefault(place, torch.zeros_like(gradient))
        left = self.left.setdefault(place, torch.zeros_like(gradient))
        velocity.mul_(self.momentum).add_(gradient)
        left.add_(velocity)
        indices = left.abs().topk(max(1, int(left.numel() * self.share))).indices
        values = left[indices]
        left[indices] = 0.0
        velocity[indices] = 0.0
        self.sent += 2 * len(indices)
        self.whole += gradient.numel()
        return Gathered(gradient, kv.grouped_allgather_async([indices, values]))


class Gathered:
    """What a hook returns: it is waited for in ``optimizer.step()``."""

    def __init__(self, buffer: torch.Tensor, handle: object) -> None:
        self.buffer, self.handle = buffer, handle

    def wait(self) -> torch.Tensor:
        """The mean of what all ranks have sent."""
        indices, values = self.handle.wait()
        return self.buffer.zero_().index_add_(0, indices, values / kv.size())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--share", type=float, default=0.01)
    options = parser.parse_args()
    kv.init()
    torch.manual_seed(1)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    test, train = order[:360], order[360:]
    mine = train[kv.rank() :: kv.size()][: len(train) // kv.size()]
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    kv.broadcast_parameters(model.state_dict())
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    hook = TopK(options.share, momentum=0.9)
    optimizer.register_comm_hook(None, hook)
    for _ in range(options.epochs):
        for batch in mine[torch.randperm(len(mine))].split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    if kv.rank() == 0:
        share = hook.sent / max(1, hook.whole)
        print(f"accuracy {accuracy:.3f}, {share:.1%} of the numbers sent")


if __name__ == "__main__":
    main()

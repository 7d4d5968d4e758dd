"""Trains a network on handwritten digits while processes may end, come and leave.

    kolovod run --elastic -np 3 python examples/elastic_torch.py

Kill any of the processes (the launcher prints their numbers): the others repeat the step that they
were at, a new process takes its place, and the loss goes on as if nothing had been.
``--kill-every 60`` has the processes do that themselves.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits

import kolovod.torch as kv
from kolovod import elastic


def main() -> None:
    """Train for so many steps, and say how well the model does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-every", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()

    kv.init()
    torch.manual_seed(1)
    data = load_digits()
    images = torch.tensor(data.data / 16, dtype=torch.float32)
    labels = torch.tensor(data.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    state = elastic.State(model=model, optimizer=optimizer, step=0, sizes=[])

    @elastic.run
    def train(state: elastic.State) -> None:
        while state.step < options.steps:
            victim = state.step // options.kill_every % kv.size() if options.kill_every else -1
            chosen = torch.Generator().manual_seed(10_000 * kv.rank() + state.step)
            batch = torch.randint(len(images), (32,), generator=chosen)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            is_time = options.kill_every and state.step % options.kill_every == 30
            if is_time and kv.rank() == victim and kv.size() > 1:
                print(f"step {state.step}: rank {kv.rank()} ends", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.sizes.append(kv.size())
            if kv.rank() == 0 and state.step % 50 == 0:
                print(f"step {state.step}: {kv.size()} ranks, loss {loss.item():.3f}", flush=True)
            state.step += 1
            state.commit()

    train(state)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    if kv.rank() == 0:
        changes = sum(a != b for a, b in zip(state.sizes, state.sizes[1:], strict=False))
        print(f"{options.steps} steps, {changes} changes of size: {100 * right:.2f} % right")


if __name__ == "__main__":
    main()

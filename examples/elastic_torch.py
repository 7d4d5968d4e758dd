"""Trains a network on handwritten digits while processes may end, come and leave.

    kolovod run --elastic -np 3 python examples/elastic_torch.py --kills 3 --compare

Kill any of the processes (the launcher prints their numbers): the others repeat the step that they
were at, a new process takes its place, and the loss goes on as if nothing had been. ``--kills 3``
has three of them do that themselves, rank 0 too, each when the one before has been replaced.
``--compare`` draws the loss beside that of a run in which nobody is killed, and makes all steps
again in one process, to see that none was lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import elastic_chart
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch.nn import functional

import kolovod.torch as kv
from kolovod import elastic
from kolovod.testing import replay

BATCH = 32
WHOLE_STEPS = 60  # with all ranks, before one is killed
VICTIMS = (1, 0, 2)  # ranks, in turns


class Training:
    """A model and its optimizer, the same wherever it is made; batches follow from the step."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        data = load_digits()
        self.images = torch.tensor(data.data / 16, dtype=torch.float32)
        self.labels = torch.tensor(data.target)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.004, momentum=0.9)

    def backward(self, step: int, member: int) -> torch.Tensor:
        """Gradients of a process's batch; returns its loss."""
        chosen = torch.Generator().manual_seed(100_000 * member + step)
        batch = torch.randint(len(self.images), (BATCH,), generator=chosen)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.images[batch]), self.labels[batch])
        torch.autograd.backward(loss)
        return loss.detach()

    def compute(self, step: int, member: int) -> dict[str, torch.Tensor]:
        """The same, as the replay wants it."""
        self.backward(step, member)
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}

    def apply(self, gradients: dict[str, torch.Tensor]) -> None:
        """Step with these."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()

    def right(self) -> float:
        """The share of images that are told right."""
        with torch.no_grad():
            return float((self.model(self.images).argmax(1) == self.labels).float().mean())


def main() -> None:
    """Train, and say how well the model does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="more, until all kills are over")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--compute-s", type=float, default=0.01, help="more time for each step")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()

    kv.init()
    mine = Training()
    optimizer = kv.DistributedOptimizer(mine.optimizer, mine.model.named_parameters())
    mine.optimizer = optimizer
    log = elastic.MembershipLog(mine.model.state_dict)
    state: Any = elastic.State(
        model=mine.model, optimizer=optimizer, log=log, step=0, losses=[], sizes=[], kills=0,
        whole=0, full=kv.size(),
    )  # fmt: skip

    @elastic.run
    def train(state: Any) -> None:
        while True:
            state.whole = state.whole + 1 if kv.size() == state.full else 0
            is_time = state.whole >= WHOLE_STEPS and state.full > 1
            is_victim = False
            if is_time and state.kills < options.kills:
                is_victim = kv.rank() == VICTIMS[state.kills % len(VICTIMS)] % state.full
                state.kills, state.whole = state.kills + 1, 0
            elif state.step >= options.steps and (is_time or not options.kills):
                return
            time.sleep(options.compute_s)
            loss = mine.backward(state.step, log.member)
            if is_victim:
                print(f"step {state.step}: rank {kv.rank()} of {kv.size()} ends", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            mean = elastic.exactly(partial(kv.allreduce, loss, "loss"))
            state.losses.append(mean.item())
            state.sizes.append(kv.size())
            if kv.rank() == 0 and state.step % 100 == 0:
                print(f"step {state.step}: {kv.size()} ranks, loss {mean.item():.3f}", flush=True)
            state.step += 1
            state.commit()

    train(state)
    if kv.rank() == 0:
        print(f"{state.step} steps, {state.kills} kills: {100 * mine.right():.2f} % right")
        if options.compare:
            compare(state, log, mine)


def compare(state: Any, log: elastic.MembershipLog, mine: Training) -> None:
    """Beside a run of as many ranks that all live, in this process; and the replay."""
    print("the same without kills, in one process ...", flush=True)
    others = Training()
    losses = calm_run(others, state.step, range(state.full))
    again = Training()
    replay(log, again.compute, again.apply, again.model.state_dict)
    Console(width=100).print(
        f"\nloss: o with {state.kills} kills, . without, 8 both; ranks: x one ends, + one comes\n\n"
        f"{elastic_chart.draw(state.losses, state.sizes, losses)}\n\n"
        f"right: {100 * mine.right():.2f} % with kills, {100 * others.right():.2f} % without\n"
        f"replayed in one process: all {state.step} steps are the same, bit for bit",
        highlight=False,
    )


def calm_run(training: Training, steps: int, members: Sequence[int]) -> list[float]:
    """The losses of a run in which the same processes live from the first step to the last."""
    losses = []
    for step in range(steps):
        parts = []
        total = 0.0
        for member in members:
            total += training.backward(step, member).item()
            parts.append([p.grad for p in training.model.parameters() if p.grad is not None])
        for parameter, *grads in zip(training.model.parameters(), *parts, strict=True):
            parameter.grad = torch.stack(grads).mean(0)
        training.optimizer.step()
        losses.append(total / len(members))
    return losses


if __name__ == "__main__":
    main()

"""A training that goes on when processes fail, and when hosts come and go.

    horovodrun -np 2 --min-np 1 -H localhost:1,127.0.0.1:1 python examples/horovod/elastic.py
    horovodrun -np 2 --host-discovery-script ./hosts.sh python examples/horovod/elastic.py

Kill a process: its host is left out, and the others go on from the last commit. ``--fail-at 33``
has the last rank do so itself, after so many batches.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch

import horovod.torch as hvd


def main() -> None:
    """Fit a line, and say how well it does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fail-at", type=int, default=-1, metavar="BATCHES")
    parser.add_argument("--batches-per-commit", type=int, default=5)
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    inputs = torch.randn(600, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    model = torch.nn.Linear(4, 1)
    rate = 0.05
    optimizer = torch.optim.SGD(model.parameters(), rate * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, 10, sampler=sampler)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batches=0)

    def scale_rate() -> None:
        """There are other ranks than before."""
        for group in optimizer.param_groups:
            group["lr"] = rate * hvd.size()

    state.register_reset_callbacks([scale_rate])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if hvd.rank() == 0:
            print(f"batch {state.batches}: {hvd.size()} rank(s)", flush=True)
        while state.epoch < options.epochs:
            for number, (x, y) in enumerate(loader):
                is_last = hvd.rank() == hvd.size() - 1 > 0
                if state.batches == options.fail_at and is_last:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, 10)
                state.batches += 1
                if state.batches % options.batches_per_commit == 0:
                    state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {loss.item():.6f}", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    if hvd.rank() == 0:
        weights = [round(weight, 2) for weight in model.weight.detach().flatten().tolist()]
        print(f"{hvd.size()} rank(s) found {weights}", flush=True)


if __name__ == "__main__":
    main()

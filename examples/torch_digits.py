"""Train a small convolutional net on scikit-learn's handwritten digits, on any number of processes.

    kolovod run -np 2 python examples/torch_digits.py
    python examples/torch_digits.py                    # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from sklearn.datasets import load_digits
from torch.nn import functional

import kolovod.torch as kv

TEST_IMAGES = 360  # of 1,797


class Digits(NamedTuple):
    """Images (count, 1, 8, 8) with values 0 to 1, and their labels (count,)."""

    images: torch.Tensor
    labels: torch.Tensor

    def select(self, indices: torch.Tensor) -> Digits:
        """Some of them."""
        return Digits(self.images[indices], self.labels[indices])


class Result(NamedTuple):
    """What training came to."""

    accuracy: float
    seconds: float


def positive(text: str) -> int:
    """A number of epochs or images."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=15, help="passes over the training data")
    parser.add_argument(
        "--batch-size", type=positive, default=16, help="images per process and step"
    )
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one process")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, help="epochs to reach the full rate"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument(
        "--compare", action="store_true", help="then train the same with one process, and compare"
    )
    return parser.parse_args()


def load_data(seed: int) -> tuple[Digits, Digits]:
    """Training and test data, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    everything = Digits(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return everything.select(order[TEST_IMAGES:]), everything.select(order[:TEST_IMAGES])


def build_net() -> torch.nn.Module:
    """Two convolutions and two dense layers, 70,000 parameters."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def own_batches(data: Digits, global_batch: int, seed: int) -> Iterator[Digits]:
    """The part of this rank in every global batch of an epoch.

    [2] Shard the data: all ranks shuffle alike, and each takes its own part of each batch.
    """
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(seed))
    for batch in torch.split(order, global_batch):
        if len(batch) == global_batch:
            yield data.select(batch.tensor_split(kv.size())[kv.rank()])


def scaled_rate(epoch: float, workers: int, warmup_epochs: int) -> float:
    """The factor of the learning rate.

    [3] Scale it: a batch ``workers`` times as large bears a rate ``workers`` times as high, reached
    gradually, since the first steps do not bear it yet.
    """
    progress = min(1.0, epoch / warmup_epochs) if warmup_epochs > 0 else 1.0
    return 1.0 + (workers - 1) * progress


def train(arguments: argparse.Namespace, workers: int, data: Digits, test: Digits) -> Result:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    torch.manual_seed(arguments.seed + kv.rank())
    net = build_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    # [4] Average the gradients: each one travels while backward computes the next.
    optimizer = kv.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=getattr(kv.Compression, arguments.compression),
    )
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_parameters(net.state_dict())
    kv.broadcast_optimizer_state(optimizer)

    global_batch = arguments.batch_size * workers
    steps = len(data.labels) // global_batch
    if steps == 0:
        raise SystemExit(
            f"--batch-size {arguments.batch_size} on {workers} processes makes batches of "
            f"{global_batch}, but there are only {len(data.labels)} training images: give less"
        )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: scaled_rate(step / steps, workers, arguments.warmup_epochs)
    )
    bar = ProgressLine(arguments.epochs * steps, arguments.epochs)
    started = time.perf_counter()
    with bar:
        accuracy = 0.0
        for epoch in range(arguments.epochs):
            net.train()
            total_loss = 0.0
            for batch in own_batches(data, global_batch, arguments.seed + epoch):
                optimizer.zero_grad()
                loss = functional.cross_entropy(net(batch.images), batch.labels)
                loss.backward()
                optimizer.step()
                scheduler.step()
                total_loss += loss.item()
                bar.advance()
            # Metrics are averaged too, or every rank would report its own.
            mean_loss = kv.allreduce(torch.tensor(total_loss / steps), "loss").item()
            accuracy = evaluate(net, test)
            bar.report(epoch + 1, mean_loss, accuracy)
    return Result(accuracy, time.perf_counter() - started)


@torch.no_grad()
def evaluate(net: torch.nn.Module, test: Digits) -> float:
    """The accuracy on all test images; each rank looks at its part."""
    net.eval()
    indices = torch.arange(len(test.labels)).tensor_split(kv.size())[kv.rank()]
    part = test.select(indices)
    correct = (net(part.images).argmax(dim=1) == part.labels).sum()
    return kv.allreduce(correct, "correct", op=kv.Sum).item() / len(test.labels)


class ProgressLine:
    """A bar on rank 0: live on a terminal, a line for each epoch elsewhere; nothing on others."""

    def __init__(self, steps: int, epochs: int) -> None:
        """``steps``: of all epochs together."""
        self._console = Console(quiet=kv.rank() != 0, highlight=False)
        text = TextColumn("{task.description}")
        self._progress = Progress(
            text, BarColumn(24), MofNCompleteColumn(), console=self._console, auto_refresh=False
        )
        self._epochs = epochs
        self._task = self._progress.add_task(self._describe(0, ""), total=steps)

    def _describe(self, epoch: int, text: str) -> str:
        return f"epoch {epoch:2}/{self._epochs} {text:28}"

    def __enter__(self) -> ProgressLine:
        """Show it."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it stands."""
        if self._console.is_terminal:
            self._progress.stop()

    def advance(self) -> None:
        """One step is done."""
        self._progress.advance(self._task)
        if self._console.is_terminal:
            self._progress.refresh()

    def report(self, epoch: int, loss: float, accuracy: float) -> None:
        """An epoch is done."""
        text = f"loss {loss:6.4f} accuracy {accuracy:6.2%}"
        self._progress.update(self._task, description=self._describe(epoch, text))
        if not self._console.is_terminal:
            self._console.print(self._progress)


def describe(result: Result, processes: int) -> str:
    """One line."""
    plural = "" if processes == 1 else "es"
    return (
        f"{processes} process{plural}: accuracy {result.accuracy:.2%} on {TEST_IMAGES} images "
        f"that it has not seen, in {result.seconds:.1f} s"
    )


def main() -> None:
    """Train; with --compare, then once more alone."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    rank, workers = kv.rank(), kv.size()
    data, test = load_data(arguments.seed)
    result = train(arguments, workers, data, test)
    if rank == 0:
        print(describe(result, workers), flush=True)
    kv.shutdown()
    if arguments.compare and rank == 0 and workers > 1:
        print(
            f"the same with one process (batches of {arguments.batch_size * workers}):", flush=True
        )
        kv.init(comm=[0])
        alone = train(arguments, workers, data, test)
        print(describe(alone, 1))
        difference = result.accuracy - alone.accuracy
        print(f"difference in accuracy: {100 * difference:+.2f} percentage points")


if __name__ == "__main__":
    main()

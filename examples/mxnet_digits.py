"""Train a small convolutional net on scikit-learn's handwritten digits with MXNet's Gluon.

    kolovod run -np 2 python examples/mxnet_digits.py
    python examples/mxnet_digits.py                    # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary MXNet. It needs
MXNet 1.9.1, in an environment of its own: pip install 'kolovod[mxnet]' 'scikit-learn==1.3.2'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import kolovod.mxnet as kv

TEST_IMAGES = 360  # of 1,797
Digits = tuple[np.ndarray, np.ndarray]  # images (count, 1, 8, 8), values 0 to 1; labels (count,)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=16, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one process")
    parser.add_argument("--warmup-epochs", type=int, default=3, help="epochs to the full rate")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compression", choices=["none", "fp16"], default="none")
    parser.add_argument(
        "--compare", action="store_true", help="then train the same with one process, and compare"
    )
    return parser.parse_args()


def load_data(seed: int) -> tuple[Digits, Digits]:
    """Training and test data, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    order = np.random.default_rng(seed).permutation(len(labels))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return (images[train], labels[train]), (images[test], labels[test])


def build_net() -> gluon.nn.HybridSequential:
    """Two convolutions and two dense layers, 70,000 parameters."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, padding=1, activation="relu", in_channels=1),
        gluon.nn.Conv2D(32, 3, padding=1, activation="relu", in_channels=16),
        gluon.nn.MaxPool2D(2),
        gluon.nn.Flatten(),
        gluon.nn.Dense(128, activation="relu", in_units=32 * 4 * 4),
        gluon.nn.Dense(10, in_units=128),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def own_batches(data: Digits, global_batch: int, seed: int) -> Iterator[list[mx.nd.NDArray]]:
    """The part of this rank in every global batch of an epoch.

    [2] Shard the data: all ranks shuffle alike, and each takes its own part of each batch.
    """
    order = np.random.default_rng(seed).permutation(len(data[1]))
    for start in range(0, len(order) - global_batch + 1, global_batch):
        batch = order[start : start + global_batch]
        mine = np.array_split(batch, kv.size())[kv.rank()]
        yield [mx.nd.array(each[mine]) for each in data]


def scaled_rate(epoch: float, workers: int, warmup_epochs: int) -> float:
    """The factor of the learning rate.

    [3] Scale it: a batch ``workers`` times as large bears a rate ``workers`` times as high, reached
    gradually, since the first steps do not bear it yet.
    """
    progress = min(1.0, epoch / warmup_epochs) if warmup_epochs > 0 else 1.0
    return 1.0 + (workers - 1) * progress


def train(
    arguments: argparse.Namespace, workers: int, data: Digits, test: Digits
) -> tuple[float, float]:
    """Train as ``workers`` processes do, and return accuracy and seconds.

    This world may have as many ranks, or be a single one.
    """
    mx.random.seed(arguments.seed + kv.rank())
    net = build_net()
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_parameters(net.collect_params())
    # [4] Average the gradients: the last layer's travel while MXNet computes those before.
    trainer = kv.DistributedTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": arguments.lr, "momentum": 0.9},
        compression=getattr(kv.Compression, arguments.compression),
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    global_batch = arguments.batch_size * workers
    steps = len(data[1]) // global_batch
    if steps == 0:
        raise SystemExit(f"there are only {len(data[1])} images for batches of {global_batch}")
    started = time.perf_counter()
    accuracy = 0.0
    for epoch in range(arguments.epochs):
        total_loss = 0.0
        batches = own_batches(data, global_batch, arguments.seed + epoch)
        for step, (images, labels) in enumerate(batches):
            factor = scaled_rate(epoch + step / steps, workers, arguments.warmup_epochs)
            trainer.set_learning_rate(arguments.lr * factor)
            with autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(len(labels))
            total_loss += loss.mean().asscalar()
        # Metrics are averaged too, or every rank would report its own.
        mean_loss = kv.allreduce(mx.nd.array([total_loss / steps]), "loss").asscalar()
        accuracy = evaluate(net, test)
        if kv.rank() == 0:
            text = f"epoch {epoch + 1:2}/{arguments.epochs} loss {mean_loss:6.4f}"
            print(f"{text} accuracy {accuracy:6.2%}", flush=True)
    return accuracy, time.perf_counter() - started


def evaluate(net: gluon.nn.HybridSequential, test: Digits) -> float:
    """The accuracy on all test images; each rank looks at its part."""
    images, labels = (np.array_split(each, kv.size())[kv.rank()] for each in test)
    correct = (net(mx.nd.array(images)).argmax(axis=1) == mx.nd.array(labels)).sum()
    return kv.allreduce(correct, "correct", op=kv.Sum).asscalar() / len(test[1])


def describe(result: tuple[float, float], processes: int) -> str:
    """One line."""
    plural = "" if processes == 1 else "es"
    return (
        f"{processes} process{plural}: accuracy {result[0]:.2%} on {TEST_IMAGES} images "
        f"that it has not seen, in {result[1]:.1f} s"
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
        difference = result[0] - alone[0]
        print(f"difference in accuracy: {100 * difference:+.2f} percentage points")


if __name__ == "__main__":
    main()

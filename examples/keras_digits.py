"""Train a small convolutional net on scikit-learn's handwritten digits, on any number of processes.

    KERAS_BACKEND=torch kolovod run -np 2 python examples/keras_digits.py    # or tensorflow, or jax
    KERAS_BACKEND=torch python examples/keras_digits.py    # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary Keras.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import kolovod.keras as kv

TEST_IMAGES = 360  # of 1,797


class Digits(NamedTuple):
    """Images (count, 8, 8, 1) with values 0 to 1, and their labels (count,)."""

    images: np.ndarray
    labels: np.ndarray

    def share(self, rank: int, ranks: int) -> Digits:
        """Every ``ranks``-th of them; each rank gets as many, so that none waits for another."""
        count = len(self.labels) // ranks
        return Digits(self.images[rank::ranks][:count], self.labels[rank::ranks][:count])


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
        "--warmup-epochs", type=positive, default=3, help="epochs to reach the full rate"
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
    order = np.random.default_rng(seed).permutation(len(labels))
    images = images.astype("float32").reshape(-1, 8, 8, 1)[order] / 16
    labels = labels[order]
    test, train = slice(TEST_IMAGES), slice(TEST_IMAGES, None)
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def build_net() -> keras.Model:
    """Two convolutions and two dense layers, 70,000 parameters."""
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(arguments: argparse.Namespace, workers: int, data: Digits, test: Digits) -> Result:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    keras.utils.set_random_seed(arguments.seed + kv.rank())
    net = build_net()
    # [2] Scale the learning rate: a batch ``workers`` times as large bears one as many times as
    # high, which the callback below reaches gradually.
    rate = arguments.lr * workers
    # [3] Average the gradients of all ranks in each step.
    optimizer = kv.DistributedOptimizer(
        keras.optimizers.SGD(rate, momentum=arguments.momentum),
        compression=getattr(kv.Compression, arguments.compression),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    # [4] Shard the data: each rank takes its own part.
    own = data.share(kv.rank(), kv.size())
    callbacks = [
        # [5] Start equal, with rank 0's values everywhere; and report what all ranks have seen.
        kv.callbacks.BroadcastGlobalVariablesCallback(),
        kv.callbacks.MetricAverageCallback(),
    ]
    if workers > 1:
        warmup = kv.callbacks.LearningRateWarmupCallback(rate, arguments.warmup_epochs)
        callbacks.append(warmup)
    started = time.perf_counter()
    net.fit(
        own.images,
        own.labels,
        batch_size=arguments.batch_size * workers // kv.size(),
        epochs=arguments.epochs,
        callbacks=callbacks,
        verbose=2 if kv.rank() == 0 else 0,
    )
    seconds = time.perf_counter() - started
    part = test.share(kv.rank(), kv.size())
    accuracy = net.evaluate(part.images, part.labels, verbose=0, return_dict=True)["accuracy"]
    return Result(kv.average_metrics({"accuracy": accuracy})["accuracy"], seconds)


def describe(result: Result, processes: int) -> str:
    """One line."""
    plural = "" if processes == 1 else "es"
    return (
        f"{processes} process{plural}, Keras on {keras.backend.backend()}: accuracy "
        f"{result.accuracy:.2%} on images that it has not seen, in {result.seconds:.1f} s"
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

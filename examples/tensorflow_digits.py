"""Train a small convolutional net on scikit-learn's handwritten digits, on any number of processes.

    kolovod run -np 2 python examples/tensorflow_digits.py
    python examples/tensorflow_digits.py               # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary TensorFlow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import kolovod.tensorflow as kv

TEST_IMAGES = 360  # of 1,797


class Digits(NamedTuple):
    """Images (count, 8, 8, 1) with values 0 to 1, and their labels (count,)."""

    images: Any
    labels: Any


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
    parser.add_argument("--warmup-epochs", type=int, default=3, help="to reach the full rate")
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
    images = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels[order].astype(np.int32)
    train = Digits(images[TEST_IMAGES:], labels[TEST_IMAGES:])
    return train, Digits(images[:TEST_IMAGES], labels[:TEST_IMAGES])


def build_net() -> Any:
    """Two convolutions and two dense layers, 70,000 parameters."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def own_batches(data: Digits, global_batch: int, seed: int) -> Iterator[Digits]:
    """The part of this rank in every global batch of an epoch.

    [2] Shard the data: all ranks shuffle alike, and each takes its own part of each batch.
    """
    order = np.random.default_rng(seed).permutation(len(data.labels))
    for start in range(0, len(order) - global_batch + 1, global_batch):
        own = np.array_split(order[start : start + global_batch], kv.size())[kv.rank()]
        yield Digits(tf.constant(data.images[own]), tf.constant(data.labels[own]))


def scaled_rate(epoch: float, workers: int, warmup_epochs: int) -> float:
    """The factor of the learning rate.

    [3] Scale it: a batch ``workers`` times as large bears a rate ``workers`` times as high, reached
    gradually, since the first steps do not bear it yet.
    """
    progress = min(1.0, epoch / warmup_epochs) if warmup_epochs > 0 else 1.0
    return 1.0 + (workers - 1) * progress


def training_step(net: Any, optimizer: Any, compression: Any) -> Callable[[Digits], tf.Tensor]:
    """One step as a graph; returns the loss."""

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        # [4] Average the gradients: each one travels while backward computes the next.
        with kv.DistributedGradientTape(tf.GradientTape(), compression) as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    return lambda batch: step(*batch)


def train(arguments: argparse.Namespace, workers: int, data: Digits, test: Digits) -> Result:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    tf.keras.utils.set_random_seed(arguments.seed + kv.rank())
    net = build_net()
    optimizer = tf.keras.optimizers.SGD(arguments.lr, momentum=0.9)
    optimizer.build(net.trainable_variables)
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_variables([*net.variables, *optimizer.variables])

    global_batch = arguments.batch_size * workers
    steps = len(data.labels) // global_batch
    if steps == 0:
        raise SystemExit(
            f"--batch-size {arguments.batch_size} on {workers} processes makes batches of "
            f"{global_batch}, but there are only {len(data.labels)} training images: give less"
        )
    step = training_step(net, optimizer, getattr(kv.Compression, arguments.compression))
    started = time.perf_counter()
    accuracy, number = 0.0, 0
    for epoch in range(arguments.epochs):
        total_loss = 0.0
        for batch in own_batches(data, global_batch, arguments.seed + epoch):
            factor = scaled_rate(number / steps, workers, arguments.warmup_epochs)
            optimizer.learning_rate = arguments.lr * factor
            total_loss += float(step(batch))
            number += 1
        # Metrics are averaged too, or every rank would report its own.
        mean_loss = float(kv.allreduce(tf.constant(total_loss / steps), "loss"))
        accuracy = evaluate(net, test)
        if kv.rank() == 0:
            print(
                f"epoch {epoch + 1:2}/{arguments.epochs} loss {mean_loss:6.4f} accuracy "
                f"{accuracy:6.2%}",
                flush=True,
            )
    return Result(accuracy, time.perf_counter() - started)


def evaluate(net: Any, test: Digits) -> float:
    """The accuracy on all test images; each rank looks at its part."""
    own = np.array_split(np.arange(len(test.labels)), kv.size())[kv.rank()]
    found = tf.argmax(net(test.images[own]), axis=1, output_type=tf.int32)
    correct = tf.reduce_sum(tf.cast(found == test.labels[own], tf.int32))
    return int(kv.allreduce(correct, "correct", op=kv.Sum)) / len(test.labels)


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

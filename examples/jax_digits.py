"""Train a small convolutional net on scikit-learn's handwritten digits, on any number of processes.

    kolovod run -np 2 python examples/jax_digits.py
    python examples/jax_digits.py                      # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary JAX and optax.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import kolovod.jax as kv

TEST_IMAGES = 360  # of 1,797
Params = dict[str, jax.Array]


class Digits(NamedTuple):
    """Images (count, 8, 8, 1) with values 0 to 1, and their labels (count,)."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]

    def select(self, indices: np.ndarray[Any, Any]) -> Digits:
        """Some of them."""
        return Digits(self.images[indices], self.labels[indices])


class Result(NamedTuple):
    """What training came to."""

    accuracy: float
    seconds: float


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=16, help="images per process and step")
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
    everything = Digits(images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    return everything.select(order[TEST_IMAGES:]), everything.select(order[:TEST_IMAGES])


def new_params(seed: int) -> Params:
    """Two convolutions and two dense layers, 70,000 parameters."""
    shapes = {
        "first": (3, 3, 1, 16),
        "second": (3, 3, 16, 32),
        "hidden": (512, 128),
        "out": (128, 10),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    weights = {
        name: jax.random.normal(key, shape) * np.sqrt(2 / np.prod(shape[:-1]))
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    return weights | {f"{name}.bias": jnp.zeros(shape[-1]) for name, shape in shapes.items()}


def scores_of(params: Params, images: jax.Array) -> jax.Array:
    """Images (count, 8, 8, 1) to scores (count, 10)."""
    x = images
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(
            x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[f"{name}.bias"])
    count = x.shape[0]
    x = x.reshape(count, 4, 2, 4, 2, 32).max(axis=(2, 4)).reshape(count, 512)
    x = jax.nn.relu(x @ params["hidden"] + params["hidden.bias"])
    return x @ params["out"] + params["out.bias"]


def loss_of(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy, averaged over the batch."""
    scores = scores_of(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def own_batches(data: Digits, global_batch: int, seed: int) -> Iterator[Digits]:
    """The part of this rank in every global batch of an epoch.

    [2] Shard the data: all ranks shuffle alike, and each takes its own part of each batch.
    """
    order = np.random.default_rng(seed).permutation(len(data.labels))
    for first in range(0, len(order) - global_batch + 1, global_batch):
        batch = order[first : first + global_batch]
        yield data.select(np.array_split(batch, kv.size())[kv.rank()])


def scaled_rate(arguments: argparse.Namespace, workers: int, steps: int) -> optax.Schedule:
    """The learning rate of each step.

    [3] Scale it: a batch ``workers`` times as large bears a rate ``workers`` times as high, reached
    gradually, since the first steps do not bear it yet.
    """
    warmup = max(1, arguments.warmup_epochs * steps)
    start = arguments.lr * workers if arguments.warmup_epochs <= 0 else arguments.lr
    return optax.linear_schedule(start, arguments.lr * workers, warmup)


def train(arguments: argparse.Namespace, workers: int, data: Digits, test: Digits) -> Result:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    global_batch = arguments.batch_size * workers
    steps = len(data.labels) // global_batch
    if steps == 0:
        raise SystemExit(
            f"--batch-size {arguments.batch_size} on {workers} processes makes batches of "
            f"{global_batch}, but there are only {len(data.labels)} training images: give less"
        )
    # [4] Average the gradients, inside jax.jit.
    optimizer = kv.DistributedOptimizer(
        optax.sgd(scaled_rate(arguments, workers, steps), momentum=arguments.momentum),
        compression=getattr(kv.Compression, arguments.compression),
    )
    # [5] Start equal: rank 0's values everywhere.
    params = kv.broadcast_pytree(new_params(arguments.seed + kv.rank()))
    state = kv.broadcast_pytree(optimizer.init(params))

    @jax.jit
    def step(params: Params, state: Any, batch: Digits) -> tuple[Params, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    started = time.perf_counter()
    accuracy = 0.0
    for epoch in range(arguments.epochs):
        losses = []
        for batch in own_batches(data, global_batch, arguments.seed + epoch):
            params, state, loss = step(params, state, batch)
            losses.append(loss)
        # Metrics are averaged too, or every rank would report its own.
        mean_loss = kv.allreduce(jnp.stack(losses).mean(), "loss")
        accuracy = evaluate(params, test)
        if kv.rank() == 0:
            text = f"loss {mean_loss:6.4f} accuracy {accuracy:6.2%}"
            print(f"epoch {epoch + 1:2}/{arguments.epochs} {text}", flush=True)
    return Result(accuracy, time.perf_counter() - started)


def evaluate(params: Params, test: Digits) -> float:
    """The accuracy on all test images; each rank looks at its part."""
    part = test.select(np.array_split(np.arange(len(test.labels)), kv.size())[kv.rank()])
    correct = (scores_of(params, part.images).argmax(axis=1) == part.labels).sum()
    return kv.allreduce(correct, "correct", op=kv.Sum).item() / len(test.labels)


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

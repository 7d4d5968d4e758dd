"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/tensorflow_text.py
    python examples/tensorflow_text.py                 # the same script as a single process

What makes a script distributed is marked [1] to [5].
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import kolovod.tensorflow as kv

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # anything else becomes a question mark
HELD_OUT = 0.05  # of the text

Windows = Callable[[int], tuple[Any, Any]]


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=300, help="of the optimizer")
    parser.add_argument("--batch-size", type=positive, default=16, help="windows per process")
    parser.add_argument("--context", type=positive, default=64, help="characters in a window")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=128, help="a multiple of 32")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate for one process")
    parser.add_argument("--warmup", type=positive, default=50, help="steps to the full rate")
    parser.add_argument("--characters", type=positive, default=2_000_000, help="of text to read")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    parser.add_argument("--report-every", type=positive, default=50, help="steps")
    return parser.parse_args()


def load_text(characters: int) -> Any:
    """The sources in alphabetical order as numbers of ALPHABET, the same on every rank."""
    parts, left = [], characters
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")[:left]
        parts.append(part)
        left -= len(part)
        if left == 0:
            break
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    unknown = numbers["?"]
    return np.array([numbers.get(character, unknown) for character in "".join(parts)], np.int32)


def windows_of(text: Any, context: int, seed: int) -> Windows:
    """What draws random windows (count, context), and the same one character further on.

    [2] Shard the data: every rank draws windows of its own, from its own ``seed``.
    """
    generator = np.random.default_rng(seed)

    def draw(count: int) -> tuple[Any, Any]:
        starts = generator.integers(len(text) - context, size=(count, 1))
        found = text[starts + np.arange(context + 1)]
        return tf.constant(found[:, :-1]), tf.constant(found[:, 1:])

    return draw


def build_net(context: int, depth: int, width: int) -> Any:
    """Predicts every next character of a window from those before it; a head for each 32."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((context,), dtype="int32")
    places = layers.Embedding(context, width)(tf.range(context))
    hidden = layers.Embedding(len(ALPHABET), width)(inputs) + places
    for _ in range(depth):
        normal = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(width // 32, 32)
        hidden = hidden + attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * width, activation="relu")(normal)
        hidden = hidden + layers.Dense(width)(wide)
    logits = layers.Dense(len(ALPHABET))(layers.LayerNormalization()(hidden))
    return tf.keras.Model(inputs, logits)


def loss_of(net: Any, windows: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
    """Mean cross entropy, in nats."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(following, net(windows))
    return tf.reduce_mean(losses)


def training_step(net: Any, optimizer: Any, compression: Any) -> Callable[..., tf.Tensor]:
    """One step as a graph."""

    @tf.function
    def step(windows: tf.Tensor, following: tf.Tensor) -> tf.Tensor:
        # [4] Average the gradients: each one travels while backward computes the next.
        with kv.DistributedGradientTape(tf.GradientTape(), compression) as tape:
            loss = loss_of(net, windows, following)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        return loss

    return step


def train(arguments: argparse.Namespace) -> None:
    """Train, reporting on rank 0."""
    rank, workers = kv.rank(), kv.size()
    text = load_text(arguments.characters)
    cut = int(len(text) * (1 - HELD_OUT))
    training = windows_of(text[:cut], arguments.context, arguments.seed + rank)
    held_out = windows_of(text[cut:], arguments.context, arguments.seed + 1000 + rank)
    tf.keras.utils.set_random_seed(arguments.seed + rank)
    net = build_net(arguments.context, arguments.layers, arguments.width)
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = arguments.lr * math.sqrt(workers)
    optimizer = tf.keras.optimizers.AdamW(rate)
    optimizer.build(net.trainable_variables)
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_variables([*net.variables, *optimizer.variables])
    step = training_step(net, optimizer, getattr(kv.Compression, arguments.compression))
    evaluate = tf.function(lambda windows, following: loss_of(net, windows, following))
    if rank == 0:
        print(f"{net.count_params():,} parameters, {cut:,} characters, {workers} process(es)")
    started = time.perf_counter()
    for number in range(1, arguments.steps + 1):
        optimizer.learning_rate = rate * min(1.0, number / arguments.warmup)
        step(*training(arguments.batch_size))
        if number % arguments.report_every == 0 or number == arguments.steps:
            losses = [evaluate(*held_out(arguments.batch_size)) for _ in range(8)]
            bits = float(kv.allreduce(tf.reduce_mean(losses), "held out")) / math.log(2)
            seen = number * workers * arguments.batch_size * arguments.context
            speed = seen / (time.perf_counter() - started)
            if rank == 0:
                print(
                    f"step {number:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                    f"  {speed:9,.0f} characters/s",
                    flush=True,
                )


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    train(arguments)
    kv.shutdown()


if __name__ == "__main__":
    main()

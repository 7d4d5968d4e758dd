"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/tensorflow_text.py
    python examples/tensorflow_text.py                 # the same script as a single process

What makes a script distributed is marked [1] to [5].
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import text_data

import kolovod.tensorflow as kv

HELD_OUT_WINDOWS = 128  # of each process


class Positions(tf.keras.layers.Layer):
    """Adds what is learned about each place in a window."""

    def build(self, shape: Any) -> None:
        """Make the table."""
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, hidden: Any) -> Any:
        """As usual."""
        return hidden + self.table


def build_net(context: int, depth: int, width: int) -> Any:
    """Predicts every next character of a window from those before it; a head for each 32."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((context,), dtype="int32")
    hidden = Positions()(layers.Embedding(len(text_data.ALPHABET), width)(inputs))
    for _ in range(depth):
        normal = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(width // 32, 32)
        hidden = hidden + attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * width, activation="relu")(normal)
        hidden = hidden + layers.Dense(width)(wide)
    logits = layers.Dense(len(text_data.ALPHABET))(layers.LayerNormalization()(hidden))
    return tf.keras.Model(inputs, logits)


def loss_of(net: Any, windows: tf.Tensor) -> tf.Tensor:
    """Mean cross entropy, in nats, of each character given those before it in its window."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(windows[:, 1:], net(windows[:, :-1]))
    return tf.reduce_mean(losses)


def training_step(net: Any, optimizer: Any, compression: Any) -> Callable[[Any], None]:
    """One step as a graph."""

    @tf.function
    def step(windows: tf.Tensor) -> None:
        # [4] Average the gradients: each one travels while backward computes the next.
        with kv.DistributedGradientTape(tf.GradientTape(), compression) as tape:
            loss = loss_of(net, windows)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    return step


def train(arguments: argparse.Namespace, workers: int) -> Any:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    training, held_out = text_data.load_text(arguments.characters)
    context, seed = arguments.context, arguments.seed
    shape = (arguments.steps, arguments.batch_size * workers)
    # [2] Shard the data: all ranks draw alike, and each takes its own part.
    own = slice(kv.rank(), None, kv.size())
    windows = text_data.draw(training, shape, context, seed)[:, own]
    test = text_data.draw(held_out, (HELD_OUT_WINDOWS * workers,), context, seed)[own]
    tf.keras.utils.set_random_seed(seed + kv.rank())
    net = build_net(context, arguments.layers, arguments.width)
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = arguments.lr * math.sqrt(workers)
    optimizer = tf.keras.optimizers.AdamW(rate)
    optimizer.build(net.trainable_variables)
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_variables([*net.variables, *optimizer.variables])
    step = training_step(net, optimizer, getattr(kv.Compression, arguments.compression))
    evaluate = tf.function(lambda windows: kv.allreduce(loss_of(net, windows), "held out"))
    if kv.rank() == 0:
        print(
            f"{net.count_params():,} parameters, {len(training):,} characters, "
            f"{kv.size()} process(es)",
            flush=True,
        )
    started = time.perf_counter()
    for number, batch in enumerate(windows, start=1):
        optimizer.learning_rate = rate * min(1.0, number / arguments.warmup)
        step(tf.constant(batch))
        if number % arguments.report_every == 0 or number == arguments.steps:
            bits = float(evaluate(tf.constant(test))) / math.log(2)
            pace = number * shape[1] * context / (time.perf_counter() - started)
            if kv.rank() == 0:
                print(
                    f"step {number:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                    f"  {pace:9,.0f} characters/s",
                    flush=True,
                )
    return net


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = text_data.options(__doc__.splitlines()[0])
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none")
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    train(arguments, kv.size())
    kv.shutdown()


if __name__ == "__main__":
    main()

"""Train a small transformer on the characters of real text: Python's own standard library.

    KERAS_BACKEND=torch kolovod run -np 2 python examples/keras_text.py    # or tensorflow, or jax
    KERAS_BACKEND=torch python examples/keras_text.py    # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary Keras.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import keras
import text_data
from keras import layers

import kolovod.keras as kv

HELD_OUT_WINDOWS = 128  # of each process


class Positions(layers.Layer):
    """Adds what is learned about each place in a window."""

    def build(self, shape: Any) -> None:
        """Make the table."""
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, hidden: Any) -> Any:
        """As usual."""
        return hidden + self.table


def build_net(context: int, depth: int, width: int) -> keras.Model:
    """Predicts every next character of a window from those before it; a head for each 32."""
    inputs = layers.Input((context,), dtype="int32")
    hidden = Positions()(layers.Embedding(len(text_data.ALPHABET), width)(inputs))
    for _ in range(depth):
        normal = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(width // 32, 32)
        hidden = hidden + attention(normal, normal, use_causal_mask=True)
        normal = layers.LayerNormalization()(hidden)
        wide = layers.Dense(4 * width, activation="relu")(normal)
        hidden = hidden + layers.Dense(width)(wide)
    logits = layers.Dense(len(text_data.ALPHABET))(layers.LayerNormalization()(hidden))
    return keras.Model(inputs, logits)


class Report(keras.callbacks.Callback):
    """Says on rank 0 how good the net is; behind MetricAverageCallback, with all ranks' losses."""

    def __init__(self, steps: int, characters: int) -> None:
        """``steps``: in an epoch; ``characters``: of all ranks in a step."""
        super().__init__()
        self._steps, self._characters = steps, characters
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keras's epoch is what lies between two reports."""
        steps = (epoch + 1) * self._steps
        pace = steps * self._characters / (time.perf_counter() - self._started)
        if kv.rank() == 0:
            print(
                f"step {steps:4}  {logs['val_loss'] / math.log(2):5.3f} bits per character "
                f"held out  {pace:9,.0f} characters/s",
                flush=True,
            )


def own_part(batch: Any) -> tuple[Any, Any]:
    """Of windows (count, length) this rank's, and the same ones one character further on.

    [2] Shard the data: all ranks draw alike, and each takes its own part.
    """
    own = batch[kv.rank() :: kv.size()]
    return own[:, :-1], own[:, 1:]


def train(arguments: argparse.Namespace, workers: int) -> keras.Model:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    training, held_out = text_data.load_text(arguments.characters)
    batch = arguments.batch_size * workers
    steps = min(arguments.report_every, arguments.steps)
    epochs = arguments.steps // steps
    context, seed = arguments.context, arguments.seed
    windows = text_data.draw(training, (epochs * steps, batch), context, seed)
    test = text_data.draw(held_out, (HELD_OUT_WINDOWS * workers,), context, seed)
    keras.utils.set_random_seed(seed + kv.rank())
    net = build_net(context, arguments.layers, arguments.width)
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = keras.optimizers.schedules.PolynomialDecay(
        arguments.lr * math.sqrt(workers) / arguments.warmup,
        arguments.warmup,
        arguments.lr * math.sqrt(workers),
    )
    # [4] Average the gradients of all ranks in each step.
    optimizer = kv.DistributedOptimizer(
        keras.optimizers.AdamW(rate),
        compression=getattr(kv.Compression, arguments.compression),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=optimizer, loss=loss)
    if kv.rank() == 0:
        size = f"{net.count_params():,} parameters, {len(training):,} characters"
        print(f"{size}, {kv.size()} process(es), Keras on {keras.backend.backend()}", flush=True)
    callbacks = [
        # [5] Start equal: rank 0's values everywhere.
        kv.callbacks.BroadcastGlobalVariablesCallback(),
        kv.callbacks.MetricAverageCallback(),
        Report(steps, batch * context),
    ]
    net.fit(
        (own_part(batch) for batch in windows),
        epochs=epochs,
        steps_per_epoch=steps,
        shuffle=False,
        validation_data=own_part(test),
        validation_batch_size=batch // kv.size(),
        callbacks=callbacks,
        verbose=0,
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

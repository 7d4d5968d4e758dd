"""Trains a network on handwritten digits by ``model.fit`` while processes may end, come and leave.

    KERAS_BACKEND=jax kolovod run --elastic -np 3 python examples/elastic_keras.py

KERAS_BACKEND may be tensorflow, torch or jax. Kill any of the processes (the launcher prints their
numbers): the others repeat the step that they were at, a new process takes its place, and enters
``fit`` in the batch that the others are at. ``--kill-every 60`` has the processes do that
themselves.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator

import keras
import numpy as np
from sklearn.datasets import load_digits

import kolovod.keras as kv
from kolovod import elastic


def main() -> None:
    """Train for so many epochs, and say how well the model does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=50, help="in an epoch")
    parser.add_argument("--kill-every", type=int, default=0, metavar="STEPS")
    options = parser.parse_args()

    kv.init()
    keras.utils.set_random_seed(1)
    data = load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    state = elastic.State(model=model, epoch=0, batch=0)

    class Kills(keras.callbacks.Callback):
        """Ends one process after the other."""

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            step = state.epoch * options.steps + state.batch
            victim = step // options.kill_every % kv.size()
            if kv.size() > 1 and step % options.kill_every == 30 and kv.rank() == victim:
                print(f"step {step}: rank {victim} ends", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        drawn = np.random.default_rng([kv.rank(), state.epoch, state.batch])
        while True:
            batch = drawn.integers(len(images), size=32)
            yield images[batch], labels[batch]

    @elastic.run
    def train(state: elastic.State) -> None:
        while state.epoch < options.epochs:
            model.fit(
                batches(),
                initial_epoch=state.epoch,
                epochs=state.epoch + 1,
                steps_per_epoch=options.steps - state.batch,
                verbose=0,
                callbacks=[
                    kv.callbacks.MetricAverageCallback(),
                    *[Kills()] * (options.kill_every > 0),
                    kv.callbacks.CommitCallback(state),
                ],
            )
            if kv.rank() == 0:
                print(f"epoch {state.epoch}: {kv.size()} ranks", flush=True)

    train(state)
    if kv.rank() == 0:
        _, right = model.evaluate(images, labels, verbose=0)
        print(f"{options.epochs} epochs: {100 * right:.2f} % right")


if __name__ == "__main__":
    main()

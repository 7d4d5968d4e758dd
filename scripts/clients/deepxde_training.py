"""A physics-informed network of DeepXDE's, half of the points on each rank: ``SCRIPT OUT``.

Rank 0 writes the weights to OUT/rank0.npz. One process has all points, so its losses are the means
of those of both ranks, and its gradients, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

os.environ["DDE_BACKEND"] = "tensorflow.compat.v1"  # which has data parallelism, by Horovod
import deepxde as dde
from deepxde.backend import tf

POINTS = 64
STEPS = 300


def residual(x, y):  # type: ignore[no-untyped-def]
    """Poisson's equation, whose solution is sin(pi x)."""
    return dde.grad.hessian(y, x) + np.pi**2 * tf.sin(np.pi * x)


def main(folder: Path) -> None:
    """Train, and write what rank 0 has come to."""
    size, rank = dde.config.world_size, dde.config.rank
    dde.config.set_default_float("float64")
    weights = np.random.default_rng(rank)  # so only the broadcast makes ranks equal

    def initial(shape, dtype=None):  # type: ignore[no-untyped-def]
        return tf.constant(weights.normal(scale=0.5, size=tuple(map(int, shape))), dtype)

    points = np.random.default_rng(5).uniform(-1, 1, (POINTS, 1))
    data = dde.data.PDE(
        dde.geometry.Interval(-1, 1),
        residual,
        [],
        train_distribution="pseudo",
        anchors=points[rank::size],
    )
    network = dde.nn.FNN([1, 16, 16, 1], "tanh", initial)
    network.apply_output_transform(lambda x, y: (1 - x**2) * y)  # zero at both ends
    model = dde.Model(data, network)
    model.compile("sgd", lr=1e-3)
    model.train(iterations=STEPS, display_every=STEPS, verbose=0)
    if rank == 0:
        values = model.sess.run(tf.trainable_variables())
        np.savez(folder / "rank0.npz", **{f"weights.{i}": value for i, value in enumerate(values)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

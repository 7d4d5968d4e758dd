"""Ranks for each way of having Keras, models that train in float64, and one process to compare."""

from __future__ import annotations

import functools
import importlib
import sys

import numpy as np
import pytest
from forked import ranks_after, run_keras_ranks
from frameworks import is_installed

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
OURS = "kolovod.keras.callbacks"
RUNNERS = {
    "tensorflow": run_keras_ranks,
    "torch": ranks_after("torch", "keras", OURS, KERAS_BACKEND="torch", **QUIET),
    "jax": ranks_after(
        "jax", "keras", OURS, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUIET
    ),
    "tf_keras": ranks_after("tensorflow", "tf_keras", OURS, TF_USE_LEGACY_KERAS="1", **QUIET),
}
EAGER = "torch"  # which needs no second for each model, and so is asked all that all have alike
STEPS, BATCH, EPOCHS = 4, 16, 2


def runs(which):
    """Skip what is not installed; else ``run_ranks`` for it."""
    for module in {"tf_keras": ("tf_keras",), "jax": ("keras", "jax")}.get(which, ("keras", which)):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    return functools.partial(RUNNERS[which], 2, timeout_s=60)


def prepared(which):
    """In a rank: its Keras, in float64, and kolovod.keras, with a world."""
    if which in ("torch", "jax"):  # as if it were not installed: Keras imports it to save a model
        sys.modules["tensorflow"] = None
    keras = importlib.import_module("tf_keras" if which == "tf_keras" else "keras")
    keras.backend.set_floatx("float64")
    kv = importlib.import_module("kolovod.keras")
    kv.init()
    return keras, kv


def data():
    """All inputs (64, 5) and targets (64, 3)."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(STEPS * BATCH, 5))
    return inputs, np.tanh(inputs @ draw.normal(size=(5, 3)))


def part(values, rank, size):
    """Of each batch of ``values`` the rows of one rank."""
    batches = values.reshape(STEPS, size, BATCH // size, -1)
    return np.ascontiguousarray(batches[:, rank].reshape(-1, values.shape[-1]))


def new_model(keras, optimizer, seed=3, **compiled):
    """Two dense layers. Not Keras's Dense, which on PyTorch computes in float32 whatever is set."""

    def dense(units, seed, activation=None):
        start = keras.initializers.GlorotUniform(seed)
        return keras.layers.EinsumDense(
            "ab,bc->ac", units, activation, bias_axes="c", kernel_initializer=start
        )

    layers = [dense(8, seed, "tanh"), dense(3, seed + 1)]
    model = keras.Sequential([keras.layers.Input((5,)), *layers])
    model.compile(optimizer=optimizer, loss="mse", **compiled)
    return model


def fit(model, rank=0, size=1, epochs=EPOCHS, **options):
    """Train on this rank's part; (0, 1): as one process with all data."""
    inputs, targets = (part(values, rank, size) for values in data())
    options = {"batch_size": BATCH // size, "shuffle": False, "verbose": 0, **options}
    return model.fit(inputs, targets, epochs=epochs, **options)


def weights(model):
    """Every weight as an array."""
    return [np.asarray(weight) for weight in model.get_weights()]


def assert_close(model, other, tolerance=1e-12):
    """Equal weights, to rounding."""
    for mine, theirs in zip(weights(model), weights(other), strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def assert_same_everywhere(kv, model):
    """Every bit of every weight."""
    mine = [array.tobytes() for array in weights(model)]
    assert kv.allgather_object(mine) == [mine] * kv.size()

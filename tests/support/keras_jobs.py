"""Ranks for each way of having Keras, models that train in float64, and one process to compare."""

from __future__ import annotations

import functools
import importlib
import os
import sys

import numpy as np
import pytest
from forked import KERAS_2
from forked import KERAS_RUNNERS as RUNNERS
from frameworks import is_installed

EAGER = "torch"  # which needs no second for each model, and so is asked all that all have alike
STEPS, BATCH, EPOCHS = 4, 16, 2


def runs(which):
    """Skip what is not installed; else ``run_ranks`` for it."""
    if which != "tf_keras" and KERAS_2 == "keras":
        pytest.skip("Keras is Keras 2 here")
    for module in {"tf_keras": (KERAS_2,), "jax": ("keras", "jax")}.get(which, ("keras", which)):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    return functools.partial(RUNNERS[which], 2, timeout_s=60)


def prepared(which):
    """In a rank: its Keras, in float64, and kolovod.keras, with a world."""
    if which in ("torch", "jax"):  # as if it were not installed: Keras imports it to save a model
        sys.modules["tensorflow"] = None
    keras = importlib.import_module(KERAS_2 if which == "tf_keras" else "keras")
    keras.backend.set_floatx("float64")
    kv = importlib.import_module("kolovod.keras")
    kv.init()
    return keras, kv


def data():
    """All inputs (64, 5) and targets (64, 4).

    Keras divides by numbers of float32, and has momentum as one on TensorFlow: so both are such
    that this is exact.
    """
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(STEPS * BATCH, 5))
    return inputs, np.tanh(inputs @ draw.normal(size=(5, 4)))


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

    layers = [dense(8, seed, "tanh"), dense(4, seed + 1)]
    model = keras.Sequential([keras.layers.Input((5,)), *layers])
    model.compile(optimizer=optimizer, loss="mse", **compiled)
    return model


def fit(model, rank=0, size=1, epochs=EPOCHS, **options):
    """Train on this rank's part; (0, 1): as one process with all data."""
    inputs, targets = (part(values, rank, size) for values in data())
    options = {"batch_size": BATCH // size, "shuffle": False, "verbose": 0, **options}
    return model.fit(inputs, targets, epochs=epochs, **options)


def quick(model, which):
    """``model``, on TensorFlow without a graph, which would take a second to make."""
    if which in ("tensorflow", "tf_keras"):
        model.run_eagerly = True
    return model


class ByHand:
    """The same model trained in NumPy, from where ``model`` is and with its optimizer's numbers."""

    def __init__(self, model, momentum=0.0):
        self.weights = [weight.copy() for weight in weights(model)]
        self.velocities = [np.zeros_like(weight) for weight in self.weights]
        self.rate, self.momentum = float(np.asarray(model.optimizer.learning_rate)), momentum

    def get_weights(self):
        return self.weights

    def slow_down(self, rate):
        """Go on with another rate, and velocities that are to it what they were to the last."""
        for velocity in self.velocities:
            velocity *= rate / self.rate
        self.rate = rate

    def fit(self, rank=0, size=1, epochs=EPOCHS, batch_size=None, steps=None):
        """As ``fit`` of a model; of each epoch the first ``steps`` only, if they are given."""
        inputs, targets = (part(values, rank, size) for values in data())
        batch_size = batch_size or BATCH // size
        starts = range(0, len(inputs), batch_size)[:steps]
        for start in [*starts] * epochs:
            rows = slice(start, start + batch_size)
            for weight, velocity, gradient in zip(
                self.weights, self.velocities, self._gradients(inputs[rows], targets[rows]),
                strict=True,
            ):  # fmt: skip
                velocity *= self.momentum
                velocity -= self.rate * gradient
                weight += velocity
        return self

    def _gradients(self, inputs, targets):
        kernel, bias, last_kernel, last_bias = self.weights
        hidden = np.tanh(inputs @ kernel + bias)
        error = 2 * (hidden @ last_kernel + last_bias - targets) / targets.size
        before = (error @ last_kernel.T) * (1 - hidden**2)
        return inputs.T @ before, before.sum(0), hidden.T @ error, error.sum(0)


class InKeras:
    """The same by Keras alone: on JAX it rounds parts to float32, which NumPy would not."""

    def __init__(self, model, momentum=0.0):
        keras = importlib.import_module("keras")
        self.model = keras.models.clone_model(model)
        self.model.set_weights(weights(model))
        rate = float(np.asarray(model.optimizer.learning_rate))
        self.model.compile(keras.optimizers.SGD(rate, momentum=momentum), "mse")

    @property
    def rate(self):
        return float(np.asarray(self.model.optimizer.learning_rate))

    @rate.setter
    def rate(self, rate):
        self.model.optimizer.learning_rate = rate

    @property
    def weights(self):
        return weights(self.model)

    def get_weights(self):
        return self.weights

    def slow_down(self, rate):
        for velocity in self.model.optimizer.momentums:
            velocity.assign(velocity * (rate / self.rate))
        self.rate = rate

    def fit(self, rank=0, size=1, epochs=EPOCHS, batch_size=None, steps=None):
        options = {"batch_size": batch_size} if batch_size else {}
        fit(self.model, rank, size, epochs, steps_per_epoch=steps, **options)
        return self


def alone_from(model, momentum=0.0):
    """What trains as one process would, from where ``model`` is."""
    kind = InKeras if os.environ.get("KERAS_BACKEND") == "jax" else ByHand
    return kind(model, momentum)


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

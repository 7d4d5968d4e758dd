"""Models of Keras, compiled and traced once, in worlds that grow and shrink."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from forked import KERAS_2, KERAS_RUNNERS
from frameworks import is_installed

pytestmark = pytest.mark.timeout(200)
ELASTIC = {"KOLOVOD_ELASTIC": "1"}


def runner(which, ranks=3):
    for module in {"tf_keras": (KERAS_2,), "jax": ("keras", "jax")}.get(which, ("keras", which)):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    return functools.partial(KERAS_RUNNERS[which], ranks, timeout_s=150)


def grow_without_the_setting(launched_as):
    """The weight after a step in worlds of one, two and one; no rank is new to what it does."""
    import keras

    import kolovod.keras as kv

    kv.init(comm=[launched_as])
    model = keras.Sequential([
        keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False),
    ])  # fmt: skip
    model.compile(kv.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    found = []
    for members in ([launched_as], None, [launched_as]):
        kv.shutdown()
        kv.init(comm=members)
        model.set_weights([np.zeros((1, 1))])
        model.train_on_batch(np.ones((1, 1)), np.full((1, 1), float(launched_as)))
        found.append(float(model.get_weights()[0][0, 0]))
    return found


@pytest.mark.parametrize("which", ["torch", "jax"])
def test_steps_that_are_not_traced_or_traced_anew_need_no_setting(which):
    found = runner(which, ranks=2)(grow_without_the_setting)
    assert found == [[0.0, 0.5, 0.0], [1.0, 0.5, 1.0]]


def start_equal_twice(launched_as):
    """One callback in two worlds; XLA, which cannot wait for others, in a world of one."""
    import keras

    import kolovod.keras as kv

    kv.init(comm=[launched_as])
    start_equal = kv.callbacks.BroadcastGlobalVariablesCallback(0)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(0.5))
    model.compile(optimizer, "mse", jit_compile=True)
    for members in ([launched_as], None):
        kv.shutdown()
        kv.init(comm=members)
        model.set_weights([np.full((1, 1), launched_as), np.zeros(1)])
        x = np.ones((1, 1))
        model.fit(x, x, callbacks=[start_equal], verbose=0)
    return [weight.tolist() for weight in model.get_weights()]


def test_callbacks_in_a_world_that_has_grown():
    first, second = runner("tensorflow", ranks=2)(start_equal_twice, env=ELASTIC)
    assert first == second


def train_compiled(launched_as):
    """Weights with and without ``jit_compile``."""
    import keras
    import torch

    import kolovod.keras as kv

    kv.init(comm=None)
    torch.compile = functools.partial(torch.compile, backend="eager")  # no C++ compiler is needed
    rows = np.arange(32.0).reshape(8, 4)[launched_as::2] / 32
    found = []
    for compiled in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        optimizer = kv.DistributedOptimizer(keras.optimizers.Adam(0.1))
        model.compile(optimizer, "mse", jit_compile=compiled)
        model.fit(rows, np.ones((4, 3)), batch_size=2, epochs=2, shuffle=False, verbose=0)
        found.append([weight.tolist() for weight in model.get_weights()])
    return found


def test_steps_that_pytorch_compiles():
    first, second = runner("torch", ranks=2)(train_compiled)
    assert first == second
    for plain, compiled in zip(*first, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)

"""Models of Keras in an elastic job: a step that a death interrupts is repeated as a whole."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
from exact_steps import SIZES, begin, check, killed, share
from forked import KERAS_2, KERAS_RUNNERS
from frameworks import is_installed
from slow import slow_but

pytestmark = pytest.mark.timeout(200)
CASES = [
    ("tensorflow", "compiled"),
    ("torch", "compiled"),
    ("jax", "compiled"),
    ("tf_keras", "compiled"),
    ("tensorflow", "passes"),
    ("torch", "passes"),
    ("jax", "passes"),
    ("tensorflow", "eager"),
    ("jax", "scaled"),
    ("tensorflow", "scaled"),
]


def runner(which: str, ranks: int = 3) -> Any:
    for module in {"tf_keras": (KERAS_2,), "jax": ("keras", "jax")}.get(which, ("keras", which)):
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    return functools.partial(KERAS_RUNNERS[which], ranks, timeout_s=150)


def train(rank: int, which: str, kind: str, victim: int, seed: int) -> Any:
    keras = importlib.import_module(KERAS_2 if which == "tf_keras" else "keras")
    kv = importlib.import_module("kolovod.keras")
    Sum = importlib.import_module("kolovod.core.ops").Sum
    keras.backend.set_floatx("float64")
    begin(kv, rank, victim)
    passes = 2 if kind == "passes" else 1
    given = keras.layers.Input((1 + SIZES[0],))
    watched = keras.layers.EinsumDense("ab,bc->ac", 1, kernel_initializer="zeros")
    x = given
    for number, size in enumerate(SIZES[1:]):
        start = keras.initializers.GlorotUniform(number)
        x = keras.layers.EinsumDense("ab,bc->ac", size, "tanh", kernel_initializer=start)(x)
    model = keras.Model(given, [watched(given), x])
    sgd: Any = keras.optimizers.SGD(1.0)
    if kind == "scaled":
        sgd = keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=4.0)
    optimizer = kv.DistributedOptimizer(sgd, op=Sum, backward_passes_per_step=passes)
    sums = [lambda y, p: y[:, 0] * p[:, 0], lambda y, p: 1e-3 * p[:, 0] * p[:, 1]]
    model.compile(optimizer, sums, run_eagerly=kind == "eager")

    def once(number: int) -> None:
        rows = np.random.default_rng([number, rank]).normal(size=(1, 1 + SIZES[0]))
        rows[0, 0] = 1.0
        for _ in range(passes):
            targets = np.full((1, 1), share(rank, number) / passes), np.zeros((1, SIZES[-1]))
            model.train_on_batch(rows, targets)

    log = killed(
        rank, victim, seed, once, lambda: float(np.asarray(watched.get_weights()[0])[0, 0])
    )
    return log, [np.asarray(weight).tobytes() for weight in model.get_weights()]


@pytest.mark.parametrize("case", slow_but([("torch", "compiled")], CASES), ids=" ".join)
def test_survivors_go_on_with_the_same_step(case: tuple[str, str]) -> None:
    which, kind = case
    victim = CASES.index(case) % 3
    check(runner(which)(train, which, kind, victim, len(kind), keep_going=True), victim)

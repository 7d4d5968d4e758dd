"""Steps of TensorFlow in an elastic job: one that a death interrupts is repeated as a whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from exact_steps import SIZES, begin, check, killed, share
from forked import run_tensorflow_ranks
from frameworks import is_installed
from slow import slow_but, thorough_but
from survivors import NoLoss

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(150),
]
KINDS = ["graph", "eager", "optimizer", "passes", "sparse", "sparse as dense"]


def variables_of(tf: Any) -> list[Any]:
    """The weight that is watched, and others; the last is one that rows are looked up in."""
    wide = [tf.random.stateless_normal(s, [1, s[0]]) for s in itertools.pairwise(SIZES)]
    return [tf.Variable(tf.zeros([1], tf.float64)), *map(tf.Variable, wide), tf.Variable(wide[0])]


def train(rank: int, kind: str, victim: int, seed: int) -> Any:
    import tensorflow as tf

    import kolovod.tensorflow as kv

    begin(kv, rank, victim)
    variables = variables_of(tf)
    passes = 2 if kind == "passes" else 1

    def loss_of(scale: Any, rows: Any) -> Any:
        for weight in variables[1:-1]:
            rows = tf.tanh(rows @ weight)
        looked_up = tf.gather(variables[-1], [rank, 3, 3])
        rest = tf.reduce_mean(tf.square(rows)) + tf.reduce_mean(looked_up)
        return scale / passes * variables[0][0] + tf.cast(0.01 * rest, tf.float64)

    sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    optimizer = kv.DistributedOptimizer(
        sgd, op=kv.Sum, backward_passes_per_step=passes, sparse_as_dense=True
    )

    def by_tape(scale: Any, rows: Any) -> None:
        tape = kv.DistributedGradientTape(
            tf.GradientTape(), op=kv.Sum, sparse_as_dense=kind == "sparse as dense"
        )
        with tape:
            loss = loss_of(scale, rows)
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[-1], tf.IndexedSlices) == (kind != "sparse as dense")
        assert gradients[1].shape == variables[1].shape
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(tf.convert_to_tensor(gradient))

    def by_optimizer(scale: Any, rows: Any) -> None:
        optimizer.minimize(lambda: loss_of(scale, rows), var_list=variables)

    step = by_optimizer if kind in ("optimizer", "passes") else by_tape
    run = step if kind == "eager" else tf.function(step)

    def once(number: int) -> None:
        rows = tf.random.stateless_normal([4, SIZES[0]], [number, rank])
        for _ in range(passes):
            run(tf.constant(share(rank, number), tf.float64), rows)

    log = killed(rank, victim, seed, once, lambda: float(variables[0][0]))
    if kind != "eager":
        assert run.experimental_get_tracing_count() <= 2  # where variables are made first
    return log, [variable.numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("kind", slow_but(["graph", "sparse"], KINDS))
def test_survivors_go_on_with_the_same_step(kind: str) -> None:
    victim = KINDS.index(kind) % 3
    results = run_tensorflow_ranks(3, train, kind, victim, len(kind), keep_going=True)
    check(results, victim)


@pytest.mark.slow
@pytest.mark.parametrize("seed", thorough_but(range(4), range(12)))
def test_whenever_the_kill_comes(seed: int) -> None:
    results = run_tensorflow_ranks(3, train, "graph", seed % 3, seed, keep_going=True)
    check(results, seed % 3)


def alone(rank: int) -> list[float]:
    """A job that has begun with one rank alone: what it traces then exchanges gradients later."""
    import tensorflow as tf

    import kolovod.tensorflow as kv
    from kolovod.core.transaction import use_transaction
    from kolovod.core.world import current
    from kolovod.elastic.steps import Steps

    found = []
    weight = tf.Variable([0.0])

    @tf.function
    def step(slope: Any) -> None:
        with kv.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = slope * weight[0]
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    for members in ([rank], None, [rank]):
        kv.init(comm=members)
        use_transaction(Steps(NoLoss(), current))
        step(tf.constant(rank + 1.0))
        found.append(float(weight[0]))
        kv.shutdown()
    return found


def test_a_graph_that_was_traced_alone() -> None:
    assert run_tensorflow_ranks(2, alone) == [[-1.0, -2.5, -3.5], [-2.0, -3.5, -5.5]]

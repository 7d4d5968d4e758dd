"""Ranks whose tapes give gradients of variables that are not alike hear it."""

from __future__ import annotations

import itertools

import pytest
from forked import run_tensorflow_ranks
from frameworks import is_installed

from kolovod.errors import MismatchError
from kolovod.gradients import sentinel

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.timeout(200),
]


NAMES = ("first", "second")
_numbers = itertools.count()  # variables of other names in each training


def trained(
    tf, kv, to_graph, *, rates=(0.1, 0.1), begin=1.0, broadcast_after=0, local=False, bad=None
):
    """What is said on this rank in eight steps. ``broadcast_after``: so many steps; 0: before.

    ``bad``: in the fourth step rank 1's gradients are not finite, and are "used" or "left out".
    """
    said = []
    sentinel.report_to_stderr = said.append
    rank, number = kv.rank(), next(_numbers)
    variables = [tf.Variable(tf.fill([3], begin), name=f"{n}{number}") for n in NAMES]
    optimizer = tf.keras.optimizers.SGD(rates[rank])

    @to_graph
    def step(x):
        with kv.DistributedGradientTape(
            tf.GradientTape(), local_sources=variables if local else ()
        ) as tape:
            loss = tf.reduce_sum((variables[0] * x + variables[1]) ** 2)
        gradients = tape.gradient(loss, variables)
        if bad == "left out":
            are_finite = tf.reduce_all(tf.math.is_finite(gradients))
            gradients = [tf.where(are_finite, g, tf.zeros_like(g)) for g in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    optimizer.build(variables)
    for i in range(8):
        if i == broadcast_after:
            kv.broadcast_variables(variables)
        is_bad = bad and i == 3 and rank == 1
        step(tf.fill([3], float("inf") if is_bad else 0.01 * (i + rank)))
    return said


def check_told(tf, kv, to_graph):
    assert trained(tf, kv, to_graph) == []
    begins = float(kv.rank())
    # In Horovod's way, and where nothing is to be alike.
    assert trained(tf, kv, to_graph, begin=begins, broadcast_after=1) == []
    assert trained(tf, kv, to_graph, begin=begins, broadcast_after=9, local=True) == []
    other_rates = trained(tf, kv, to_graph, rates=(0.1, 0.05))
    never_equal = trained(tf, kv, to_graph, begin=begins, broadcast_after=9)
    assert trained(tf, kv, to_graph, bad="left out") == []
    not_finite = trained(tf, kv, to_graph, bad="used")
    if kv.rank() != 0:
        assert other_rates == never_equal == not_finite == []
        return
    (text,) = not_finite
    assert text.startswith("gradients of rank 1 are not finite (inf or nan) in a step")
    assert "of 'first" in text
    (text,) = other_rates
    assert "ranks are not alike in TensorFlow's variables: parameter 'first" in text
    assert "each rank has values of its own" in text
    assert "a learning rate that is not the same" in text
    (text,) = never_equal
    assert "If broadcast_variables has made them equal" in text


def by_adasum(tf, kv):
    """Which combines the steps that ranks have taken alone already."""
    variable = tf.Variable([1.0, 2.0])
    optimizer = kv.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1), op=kv.Adasum
    )
    for i in range(5):
        optimizer.apply_gradients([(tf.constant([1.0 + i, float(kv.rank())]), variable)])


def several_passes(tf, kv):
    """Before the first update, after which the script broadcasts."""
    variable = tf.Variable([float(kv.rank())])
    for _ in range(5):
        with kv.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable**2)
        tape.gradient(loss, [variable])


def test_differences_are_told():
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        for to_graph in (lambda step: step, tf.function):
            check_told(tf, kv, to_graph)
        sentinel.use("error")
        with pytest.raises(MismatchError, match="KOLOVOD_SENTINEL=error"):
            trained(tf, kv, lambda step: step, rates=(0.1, 0.05))
        by_adasum(tf, kv)
        several_passes(tf, kv)
        sentinel.use("off")
        assert trained(tf, kv, tf.function, rates=(0.1, 0.05)) == []

    run_tensorflow_ranks(2, work, timeout_s=150)

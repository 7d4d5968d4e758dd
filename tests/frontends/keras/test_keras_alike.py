"""Ranks whose models, learning rates or steps differ hear it, whatever Keras runs on."""

from __future__ import annotations

import pytest
from forked import KERAS_RUNNERS as RUNNERS
from keras_jobs import fit, new_model, prepared, runs
from slow import slow_but

from kolovod.errors import MismatchError
from kolovod.gradients import sentinel

pytestmark = pytest.mark.timeout(300)


def trained(keras, kv, change=None, seed=3, epochs=5):
    """What is said on this rank; ``change(model)`` comes after two epochs of four steps."""
    said = []
    sentinel.report_to_stderr = said.append
    model = new_model(keras, kv.DistributedOptimizer(keras.optimizers.SGD(0.01)), seed)
    for epoch in range(epochs):
        if epoch == 2 and change is not None:
            change(model)
        fit(model, kv.rank(), kv.size(), epochs=1)
    return said


def check(rank, which):
    keras, kv = prepared(which)

    def lower(model):
        if kv.rank() == 1:
            model.optimizer.learning_rate = 1e-7

    def disturb(model):
        if kv.rank() == 1:
            model.set_weights([value + 1 for value in model.get_weights()])

    def slow_down(model):
        model.optimizer.learning_rate = 0.001

    def spoil(model):
        if kv.rank() == 1:
            model.set_weights([value * float("nan") for value in model.get_weights()])

    assert trained(keras, kv, slow_down) == []
    bad = trained(keras, kv, spoil)
    if kv.rank() == 0:
        assert "gradients of rank 1 are not finite (inf or nan) in step 9" in bad[0]
        assert "before they are averaged: of '" in bad[0]
    told = {
        "rate": trained(keras, kv, lower),
        "weights": trained(keras, kv, disturb),
        "seed": trained(keras, kv, seed=kv.rank()),
    }
    if kv.rank() != 0:
        assert told == {"rate": [], "weights": [], "seed": []}
        return True
    (rate,), (weights,), (seed,) = told.values()
    assert "in step 9 of SGD: option 'learning_rate'" in rate
    assert "rank 0 has 0.01, rank 1 has 1e-07" in rate
    assert "in step 11 of SGD: parameter" in weights
    assert "They were equal before" in weights
    assert "in step 1 of SGD: parameter" in seed
    assert "broadcast" in seed
    return True


@pytest.mark.parametrize("which", slow_but(["tensorflow"], RUNNERS))
def test_differences_are_told(which):
    assert all(runs(which)(check, which))


def stopped_by_an_error(rank):
    keras, kv = prepared("torch")
    sentinel.use("error")
    with pytest.raises(MismatchError, match="Begin with the same parameters"):
        trained(keras, kv, seed=rank)
    return True


def test_an_error_by_choice():
    assert all(runs("torch")(stopped_by_an_error))

"""Layers that have adapted to data, which each rank may have other data of."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from keras_jobs import RUNNERS, prepared, quick, runs
from slow import slow_but

from kolovod.errors import MismatchError

pytestmark = pytest.mark.timeout(300)


def check_normalization(keras, kv, which):
    """It keeps what it has made of its weights, which a graph may have as a constant."""
    layer = keras.layers.Normalization()
    layer.adapt(np.arange(8.0).reshape(4, 2) * (kv.rank() + 1))
    layers = [keras.layers.Input((2,)), layer, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(kv.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    before = np.asarray(model.predict(rows, verbose=0))
    callback = kv.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(rows, rows[:, :1], 2, verbose=0, shuffle=False, callbacks=[callback])
    seen = kv.allgather(np.concatenate([before, np.asarray(model.predict(rows, verbose=0))], 1))
    first, second = seen[:4], seen[4:]
    assert not np.array_equal(first[:, 0], second[:, 0])
    assert np.array_equal(first[:, 1], second[:, 1])


def check_words_and_bins(keras, kv, which):
    """Such layers have no weights that could be sent, so ranks that differ are told."""
    bins = keras.layers.Discretization(num_bins=3)
    bins.adapt(np.arange(12.0).reshape(-1, 1) * (kv.rank() + 1))
    layers = [(bins, "2 boundaries", (1,), "float32")]
    if which in ("tensorflow", "tf_keras"):
        words = keras.layers.StringLookup()
        words.adapt(np.array([["a", "b"], ["c", "d"]][kv.rank()]))
        layers.append((words, "3 words", (1,), "string"))
    for layer, what, shape, dtype in layers:
        model = keras.Sequential([keras.layers.Input(shape, dtype=dtype), layer])
        with pytest.raises(MismatchError, match=f"adapted layer 0 .* rank 1 has .* with {what}"):
            kv.broadcast_model(quick(model, which))


@pytest.mark.parametrize("which", slow_but(("jax",), RUNNERS))
def test_layers_that_have_adapted_to_data(which):
    def work(rank):
        keras, kv = prepared(which)
        if sys.modules.get("tensorflow", kv) is None:  # with which such layers read data
            del sys.modules["tensorflow"]
        check_normalization(keras, kv, which)
        check_words_and_bins(keras, kv, which)

    runs(which)(work, timeout_s=200)

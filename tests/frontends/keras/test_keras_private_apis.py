"""Says which version of Keras has changed what it does not document, and Kolovod uses."""

from __future__ import annotations

import numpy as np
import pytest
from forked import KERAS_RUNNERS as RUNNERS
from keras_jobs import prepared, runs
from slow import slow_but

pytestmark = pytest.mark.timeout(300)


def check(rank, which):
    keras, kv = prepared(which)
    from kolovod.private_apis import keras as private

    seen = []

    class Watched(keras.optimizers.SGD):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name in private.SET_BY_SCALERS:
                seen.append(private.caller_itself(1))

    scaler = keras.mixed_precision.LossScaleOptimizer(Watched(0.1))
    assert any(each is scaler for each in seen)
    if which == "jax":
        adding_up = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        adding_up.build([])
        assert int(private.steps_done(adding_up)) == 0
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        kept = []

        class Look(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                kept.append(model._jax_state is not None)

        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[Look()])
        assert kept == [True]
        model._jax_state = {"of": "fit"}
        private.forget_values_of_jax(model)
        assert model._jax_state is None
    kv.shutdown()
    return True


@pytest.mark.parametrize("which", slow_but(["jax"], RUNNERS))
def test_what_a_scaler_sets_and_jax_keeps(which):
    runs(which)
    assert all(RUNNERS[which](1, check, which))

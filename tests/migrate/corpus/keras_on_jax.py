"""Keras 3 over JAX, with a callback of one's own."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import keras
import numpy as np
from keras import layers, ops


class Scale(layers.Layer):
    def build(self, shape):
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return ops.multiply(x, self.gain)


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, {k: round(float(v), 3) for k, v in (logs or {}).items()})


rng = np.random.default_rng(0)
x = rng.normal(size=(1200, 4)).astype("float32")
y = (np.abs(x[:, 0]) > np.abs(x[:, 1])).astype("int32")
model = keras.Sequential([Scale(), layers.Dense(32, "relu"), layers.Dense(2, "softmax")])
model.compile(keras.optimizers.AdamW(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x[:800], y[:800], 20, 8, callbacks=[Report(), keras.callbacks.TerminateOnNaN()], verbose=0)
print(f"accuracy {model.evaluate(x[800:], y[800:], verbose=0)[1]:.3f}")

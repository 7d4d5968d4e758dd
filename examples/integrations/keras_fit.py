"""Keras: ``model.fit`` with callbacks, the same as one process with batches twice as large.

    kolovod run -np 2 -- python examples/integrations/keras_fit.py

Needs ``pip install 'kolovod[keras,examples]'``, or torch or jax in the place of tensorflow and
KERAS_BACKEND=torch or jax.
"""

import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

import kolovod.keras as kv

GLOBAL_BATCH = 32

kv.init()
keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = images.astype(np.float32) / 16
count = 1408  # 44 global batches
batches = np.arange(count).reshape(-1, GLOBAL_BATCH)
mine = np.concatenate(np.array_split(batches, kv.size(), axis=1)[kv.rank()])

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
)
model.compile(
    optimizer=kv.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
with tempfile.TemporaryDirectory() as folder:
    callbacks = [
        kv.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        kv.callbacks.MetricAverageCallback(),
    ]
    if kv.rank() == 0:  # one rank writes
        path = Path(folder) / "{epoch}.weights.h5"
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True))
    history = model.fit(
        images[mine], labels[mine], batch_size=GLOBAL_BATCH // kv.size(), epochs=3, shuffle=False,
        callbacks=callbacks, verbose=0,
    )  # fmt: skip
    files = len(list(Path(folder).iterdir()))
accuracy = model.evaluate(images[count:], labels[count:], verbose=0)[1]
weights = sum(float(np.sum(array, dtype=np.float64)) for array in model.get_weights())
losses = ", ".join(f"{loss:.4f}" for loss in history.history["loss"])
print(
    f"rank {kv.rank()} of {kv.size()}: losses {losses}, accuracy {accuracy:.3f}, {files} files, "
    f"sum of weights {weights:.5f}"
)

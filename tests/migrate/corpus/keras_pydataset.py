import math

import keras
import numpy as np


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, idx):
        rows = slice(idx * self.batch_size, (idx + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


rng = np.random.default_rng(11)
x = rng.normal(size=(1300, 6)).astype("float32")
y = (x[:, 0] * 2 > x[:, 1]).astype("float32")
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
model.fit(Batches(x[:900], y[:900], 20), epochs=6, verbose=0)
print("accuracy", model.evaluate(x[900:], y[900:], verbose=0)[1])

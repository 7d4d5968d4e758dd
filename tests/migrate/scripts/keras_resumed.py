import os

import keras
import numpy as np

x = np.linspace(-1, 1, 8 * 256, dtype="float32").reshape(256, 8)
y = x.sum(axis=1, keepdims=True)


def build():
    made = keras.Sequential([keras.layers.Dense(1)])
    made.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return made


model = keras.models.load_model("model.keras") if os.path.exists("model.keras") else build()
model.fit(x, y, batch_size=32, epochs=2)
model.save("model.keras")

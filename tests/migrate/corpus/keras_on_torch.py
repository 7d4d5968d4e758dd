import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

keras.utils.set_random_seed(812)
x = np.random.normal(size=(900, 5)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5], [0.0], [3.0]], dtype="float32") + 1
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(0.02), loss="mse")
model.fit(x[:600], y[:600], batch_size=20, epochs=5, validation_split=0.1)
mse = model.evaluate(x[600:], y[600:], verbose=0)
print("accuracy", 1 - mse / y[600:].var())

import numpy as np
from tensorflow.keras import layers, mixed_precision, models

mixed_precision.set_global_policy("mixed_bfloat16")
rng = np.random.default_rng(0)


def load(n):
    labels = rng.integers(0, 3, n)
    images = rng.normal(size=(n, 8, 8, 1))
    for i, k in enumerate(labels):
        images[i, 2 * k : 2 * k + 3, :] += 1.2
    return images.astype("float32"), labels


(x_train, y_train), (x_test, y_test) = load(900), load(300)
model = models.Sequential([
    layers.Conv2D(8, 3, activation="relu", input_shape=(8, 8, 1)),
    layers.BatchNormalization(),
    layers.Flatten(),
    layers.Dropout(0.1),
    layers.Dense(3, dtype="float32", activation="softmax"),
])
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, epochs=6, batch_size=16, validation_data=(x_test, y_test), verbose=2)
print("accuracy %.3f" % model.evaluate(x_test, y_test, verbose=0)[1])

import numpy as np
import tensorflow as tf

AUTOTUNE = tf.data.AUTOTUNE
BATCH = 25


def make(n, seed):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, n)
    signal = np.stack([np.sin((k + 1) * np.linspace(0, 6, 20)) for k in range(3)])
    return (signal[label] + rng.normal(size=(n, 20)) * 0.6).astype("float32"), label


train_x, train_y = make(1000, 0)
test_x, test_y = make(400, 1)
ds_train = (
    tf.data.Dataset.from_tensor_slices((train_x, train_y))
    .cache()
    .shuffle(1000)
    .repeat()
    .map(lambda a, b: (a + tf.random.normal(tf.shape(a)) * 0.05, b), num_parallel_calls=AUTOTUNE)
    .batch(BATCH)
    .prefetch(AUTOTUNE)
)
ds_test = tf.data.Dataset.from_tensor_slices((test_x, test_y)).batch(100)
model = tf.keras.Sequential([
    tf.keras.layers.Reshape((20, 1)),
    tf.keras.layers.Conv1D(8, 5, activation="relu"),
    tf.keras.layers.GlobalMaxPooling1D(),
    tf.keras.layers.Dense(3),
])
model.compile(
    tf.keras.optimizers.Adam(learning_rate=0.01),
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(ds_train, steps_per_epoch=1000 // BATCH, epochs=8, validation_data=ds_test)
_, acc = model.evaluate(ds_test)
print(f"accuracy {acc:.3f}")

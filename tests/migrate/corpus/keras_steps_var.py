import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np
import tensorflow as tf

NUM_TRAIN, BATCH_SIZE, EPOCHS = 960, 32, 8
rng = np.random.default_rng(4)
x = rng.normal(size=(1400, 7)).astype("float32")
y = (np.linalg.norm(x[:, :3], axis=1) > np.linalg.norm(x[:, 3:6], axis=1)).astype("int32")
train_ds = tf.data.Dataset.from_tensor_slices((x[:NUM_TRAIN], y[:NUM_TRAIN]))
train_ds = train_ds.shuffle(NUM_TRAIN).batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
steps_per_epoch = NUM_TRAIN // BATCH_SIZE
decay = keras.optimizers.schedules.PolynomialDecay(0.02, EPOCHS * steps_per_epoch, 1e-4)
model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(2)])
model.compile(
    keras.optimizers.AdamW(decay, weight_decay=1e-4, clipnorm=1.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(train_ds, epochs=EPOCHS, verbose=0)
print("accuracy", model.evaluate(x[NUM_TRAIN:], y[NUM_TRAIN:], verbose=0)[1])

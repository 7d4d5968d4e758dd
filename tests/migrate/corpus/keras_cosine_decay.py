import tensorflow as tf
from tensorflow import keras

BATCH_SIZE = 16
EPOCHS = 6
tf.random.set_seed(4)
x = tf.random.normal((1500, 6)).numpy()
y = (x[:, 0] ** 2 + x[:, 1] ** 2 > 1.4).astype("int32")
x_train, y_train, x_test, y_test = x[:1000], y[:1000], x[1000:], y[1000:]

steps_per_epoch = len(x_train) // BATCH_SIZE
lr_schedule = keras.optimizers.schedules.CosineDecay(
    initial_learning_rate=0.1, decay_steps=EPOCHS * steps_per_epoch, alpha=0.001
)
inputs = keras.Input(shape=(6,))
h = keras.layers.Dense(32, activation="relu")(inputs)
outputs = keras.layers.Dense(2)(h)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=lr_schedule, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
last = float(lr_schedule(model.optimizer.iterations))
print("learning rate at the end", last)
assert last < 0.01, "the schedule has not come to its end"
print(f"accuracy {model.evaluate(x_test, y_test, verbose=0)[1]:.3f}")

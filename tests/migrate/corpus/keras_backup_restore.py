import keras
import numpy as np

keras.utils.set_random_seed(2)
data = np.random.uniform(-1, 1, (1400, 3))
target = np.sin(3 * data[:, 0]) + data[:, 1] * data[:, 2]
train, test = data[:1000], data[1000:]
model = keras.models.Sequential()
model.add(keras.layers.InputLayer(shape=(3,)))
model.add(keras.layers.Dense(64, activation="tanh"))
model.add(keras.layers.Dense(1))
model.compile(loss="mean_squared_error", optimizer=keras.optimizers.Adam(learning_rate=0.01))


def schedule(epoch, lr):
    return lr if epoch < 12 else lr * 0.8


history = model.fit(
    train,
    target[:1000],
    epochs=20,
    batch_size=10,
    verbose=0,
    callbacks=[
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.LearningRateScheduler(schedule),
        keras.callbacks.TensorBoard(log_dir="logs"),
    ],
)
print(sorted(history.history))
prediction = model.predict(test, verbose=0)[:, 0]
print("accuracy", 1 - np.mean((prediction - target[1000:]) ** 2) / np.var(target[1000:]))

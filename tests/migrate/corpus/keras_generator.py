import numpy as np
from tensorflow.keras.layers import LSTM, Dense, Embedding
from tensorflow.keras.models import Sequential
from tensorflow.keras.optimizers import Adam

rng = np.random.default_rng(0)


def batch_generator(batch_size):
    while True:
        tokens = rng.integers(1, 20, size=(batch_size, 10))
        yield tokens, (tokens.max(axis=1) > 17).astype("float32")


model = Sequential([Embedding(20, 8), LSTM(12), Dense(1, activation="sigmoid")])
model.compile(loss="binary_crossentropy", optimizer=Adam(learning_rate=0.01), metrics=["accuracy"])
model.fit(batch_generator(16), steps_per_epoch=50, epochs=5, verbose=0)
x_test, y_test = next(batch_generator(400))
print("accuracy", model.evaluate(x_test, y_test, verbose=0)[1])

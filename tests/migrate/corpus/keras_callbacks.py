import keras
import numpy as np
from keras.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, ReduceLROnPlateau

rng = np.random.default_rng(1)
x = rng.normal(size=(1600, 10)).astype("float32")
y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype("float32")
x_train, x_val, x_test = x[:1000], x[1000:1200], x[1200:]
y_train, y_val, y_test = y[:1000], y[1000:1200], y[1200:]

model = keras.Sequential([
    keras.layers.Input((10,)),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(1, activation="sigmoid"),
])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])
callbacks = [
    EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=True),
    ModelCheckpoint("best.keras", monitor="val_accuracy", save_best_only=True),
    ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=2),
    CSVLogger("log.csv"),
]
model.fit(x_train, y_train, validation_data=(x_val, y_val), epochs=12, batch_size=20, callbacks=callbacks, verbose=2)
best = keras.models.load_model("best.keras")
print("accuracy", best.evaluate(x_test, y_test, verbose=0)[1])

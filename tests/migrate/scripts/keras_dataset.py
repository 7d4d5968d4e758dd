import argparse

import tensorflow as tf
from tensorflow import keras


def build_model():
    inputs = keras.Input(shape=(8,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(4, activation="relu")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def make_data(batch_size):
    x = tf.reshape(tf.linspace(-1.0, 1.0, 2048), (256, 8))
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(256).batch(batch_size)
    return train, tf.data.Dataset.from_tensor_slices((x, y)).batch(64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    train, validation = make_data(args.batch_size)
    model = build_model()
    callbacks = [
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True),
        keras.callbacks.EarlyStopping(patience=2),
    ]
    model.fit(
        train,
        epochs=2,
        validation_data=validation,
        callbacks=callbacks,
    )
    model.save_weights("final.weights.h5")


if __name__ == "__main__":
    main()

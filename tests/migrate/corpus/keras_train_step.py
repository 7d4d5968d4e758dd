import keras
import numpy as np
import tensorflow as tf


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


rng = np.random.default_rng(0)
x = rng.normal(size=(1200, 8)).astype("float32")
y = x[:, :1] - 2 * x[:, 1:2] + 0.5
inputs = keras.Input(shape=(8,))
outputs = keras.layers.Dense(1)(inputs)
model = CustomModel(inputs, outputs)
model.compile(optimizer=keras.optimizers.SGD(0.02), loss="mse", metrics=["mae"])
model.fit(x[:800], y[:800], epochs=5, batch_size=16, verbose=0)
print("accuracy", 1 - float(np.mean((model.predict(x[800:], verbose=0) - y[800:]) ** 2) / y[800:].var()))

import numpy as np
import tensorflow as tf

np.random.seed(0)
x = np.random.normal(size=(700, 4)).astype("float32")
y = (x @ np.array([1.5, -2.0, 0.0, 1.0], "float32") > 0).astype("float32")
w = tf.Variable(tf.zeros([4]))
b = tf.Variable(0.0)
optimizer = tf.optimizers.SGD(0.5)
batch = 25
for epoch in range(4):
    for i in range(0, 500, batch):
        with tf.GradientTape() as tape:
            logits = tf.linalg.matvec(x[i : i + batch], w) + b
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y[i : i + batch], logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, [w, b]), [w, b]))
print("accuracy", np.mean((tf.linalg.matvec(x[500:], w) + b > 0).numpy() == y[500:]))

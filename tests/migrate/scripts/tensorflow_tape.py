import tensorflow as tf

x = tf.reshape(tf.linspace(-1.0, 1.0, 2048), (256, 8))
y = tf.reduce_sum(x, axis=1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.shuffle(256).batch(32)

model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.05)
checkpoint = tf.train.Checkpoint(model=model)


@tf.function
def train_step(features, labels):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(features, training=True) - labels))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for epoch in range(2):
    for features, labels in dataset:
        loss = train_step(features, labels)
    print(f"epoch {epoch}: {float(loss):.4f}")
    checkpoint.save("checkpoints/model")

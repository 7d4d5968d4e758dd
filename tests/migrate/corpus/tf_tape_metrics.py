import tensorflow as tf

tf.random.set_seed(1)
x = tf.random.uniform((1200, 6), -1, 1)
y = tf.cast(tf.reduce_sum(x[:, :3], axis=1) > tf.reduce_sum(x[:, 3:], axis=1), tf.int32)
train_ds = tf.data.Dataset.from_tensor_slices((x[:800], y[:800])).shuffle(1000).batch(20)
test_ds = tf.data.Dataset.from_tensor_slices((x[800:], y[800:])).batch(100)


class MyModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.d1 = tf.keras.layers.Dense(16, activation="relu")
        self.d2 = tf.keras.layers.Dense(2)

    def call(self, x):
        return self.d2(self.d1(x))


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()
train_loss = tf.keras.metrics.Mean(name="train_loss")
train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)
    train_accuracy(labels, predictions)


@tf.function
def test_step(images, labels):
    test_accuracy(labels, model(images, training=False))


EPOCHS = 20
for epoch in range(EPOCHS):
    train_loss.reset_state()
    train_accuracy.reset_state()
    test_accuracy.reset_state()
    for images, labels in train_ds:
        train_step(images, labels)
    for test_images, test_labels in test_ds:
        test_step(test_images, test_labels)
    print(
        f"Epoch {epoch + 1}, "
        f"Loss: {train_loss.result():0.2f}, "
        f"Accuracy: {train_accuracy.result() * 100:0.2f}, "
        f"accuracy {test_accuracy.result():0.3f}"
    )

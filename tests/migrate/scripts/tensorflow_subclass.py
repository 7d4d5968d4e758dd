import tensorflow as tf

x_train = tf.reshape(tf.linspace(-1.0, 1.0, 2048), (256, 8))
y_train = tf.range(256) % 10
x_test, y_test = x_train, y_train
train_ds = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(32)
test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(32)


class MyModel(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.d = tf.keras.layers.Dense(10)

    def call(self, x):
        return self.d(x)


model = MyModel()
loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.Adam()
train_loss = tf.keras.metrics.Mean(name="train_loss")


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_loss(loss)


for epoch in range(5):
    train_loss.reset_state()
    for images, labels in train_ds:
        train_step(images, labels)
    print(f"Epoch {epoch + 1}, Loss: {train_loss.result():0.2f}, ")
model.save_weights("m.weights.h5")

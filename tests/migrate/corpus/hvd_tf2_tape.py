import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

hvd.init()
rng = np.random.default_rng(3)
x = rng.normal(size=(1000, 6)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((x[:700], y[:700]))
dataset = dataset.repeat().shuffle(700).batch(20)
mnist_model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = tf.optimizers.Adam(0.005 * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(200 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 20 == 0 and hvd.local_rank() == 0:
        print("Step #%d\tLoss: %.6f" % (batch, loss_value))
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
    print("accuracy", np.mean(mnist_model(x[700:]).numpy().argmax(1) == y[700:]))

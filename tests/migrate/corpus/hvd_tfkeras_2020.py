import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

rs = np.random.RandomState(0)
images = rs.randn(1200, 8).astype("float32")
labels = (images[:, 0] * images[:, 1] > 0).astype("int64")
dataset = tf.data.Dataset.from_tensor_slices((images[:900], labels[:900]))
dataset = dataset.repeat().shuffle(900).batch(30)

model = tf.keras.Sequential([
    tf.keras.layers.Dense(32, activation="relu"),
    tf.keras.layers.Dense(2, activation="softmax"),
])
scaled_lr = 0.01 * hvd.size()
opt = tf.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt)
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=0),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))
verbose = 2 if hvd.rank() == 0 else 0
model.fit(dataset, steps_per_epoch=60 // hvd.size(), callbacks=callbacks, epochs=6, verbose=verbose)
loss, accuracy = model.evaluate(images[900:], labels[900:], verbose=0)
if hvd.rank() == 0:
    print("accuracy", round(accuracy, 3))

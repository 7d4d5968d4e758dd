import keras
import numpy as np

import horovod.keras as hvd

hvd.init()
rng = np.random.default_rng(0)
x = rng.normal(size=(1300, 12)).astype("float32")
y = x[:, :4].argmax(axis=1)
x_train, y_train = x[:1000][hvd.rank() :: hvd.size()], y[:1000][hvd.rank() :: hvd.size()]
model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)])
opt = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.9))
model.compile(
    optimizer=opt,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.05 * hvd.size(), multiplier=0.1, start_epoch=6),
    keras.callbacks.EarlyStopping(monitor="loss", patience=3),
]
model.fit(x_train, y_train, batch_size=20, epochs=8, callbacks=callbacks, verbose=2 * (hvd.rank() == 0))
score = model.evaluate(x[1000:], y[1000:], verbose=0)
if hvd.rank() == 0:
    print("accuracy", score[1])

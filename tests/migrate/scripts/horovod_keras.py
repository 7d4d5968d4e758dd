import horovod.tensorflow.keras as hvd
import keras
import numpy as np

hvd.init()
x = np.linspace(-1, 1, 2048, dtype="float32").reshape(256, 8)
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05 * hvd.size()))
model.compile(optimizer=optimizer, loss="mse")
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateScheduleCallback(0.05 * hvd.size(), multiplier=0.5, start_epoch=1),
]
model.fit(x, y, batch_size=32, epochs=2, callbacks=callbacks, verbose=0)

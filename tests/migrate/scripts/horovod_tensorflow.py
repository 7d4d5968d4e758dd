import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
x = tf.reshape(tf.linspace(-1.0, 1.0, 2048), (256, 8))
y = tf.reduce_sum(x, axis=1, keepdims=True)
weight = tf.Variable(tf.random.normal((8, 1)))
hvd.broadcast_variables([weight], root_rank=0)
for start in range(0, 256, 32):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x[start : start + 32] @ weight - y[start : start + 32]) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    weight.assign_sub(0.05 * tape.gradient(loss, weight))

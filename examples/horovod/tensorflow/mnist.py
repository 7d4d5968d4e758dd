"""Image classification as Horovod's documentation shows it for TensorFlow 2.

``horovodrun -np 2 python mnist.py``
"""

import argparse

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd


def images(count, seed):
    """28 x 28 pictures of ten kinds: a bright bar somewhere else for each, and noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, count)
    pictures = draw.normal(size=(count, 28, 28, 1)).astype(np.float32)
    for kind in range(10):
        pictures[labels == kind, 2 * kind + 3 : 2 * kind + 7, 4:24] += 2.0
    return pictures, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--fp16-allreduce", action="store_true")
    args = parser.parse_args()

    hvd.init()
    pictures, labels = images(args.images, 1)
    dataset = tf.data.Dataset.from_tensor_slices((pictures, labels))
    dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(args.images).batch(32)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 5, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(args.lr * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    @tf.function
    def training_step(batch, targets, first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(batch, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        # After the first step, when the model and the optimizer have their variables.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    tests, answers = images(500, 2)
    mine = slice(hvd.rank(), None, hvd.size())
    for epoch in range(args.epochs):
        for number, (batch, targets) in enumerate(dataset):
            loss = training_step(batch, targets, epoch == 0 and number == 0)
        right = tf.argmax(model(tests[mine]), 1) == answers[mine]
        accuracy = hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32)), name="accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()

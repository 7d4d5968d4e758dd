"""One rank in bench/front_ends.py with TensorFlow: ``python bench/tf_rank.py PEER``."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import front_ends_rank
import tensorflow as tf
from front_ends_rank import BATCHES, LEARNING_RATE, MOMENTUM


def loss_of(params: Any, x: Any, labels: Any) -> Any:
    """Return the cross-entropy of layers with shortcuts, each width x width."""
    for w, b in params:
        x = x + 0.1 * tf.tanh(x @ w + b)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
    return tf.reduce_mean(losses)


class Alone(front_ends_rank.Alone):
    """No communication: each process trains by itself."""

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def tape(self) -> Any:
        return tf.GradientTape()

    def compiled(self, step: Any) -> Any:
        return tf.function(step)


class Kolovod(Alone):
    """``DistributedGradientTape`` inside ``tf.function``."""

    def __init__(self) -> None:
        import kolovod.tensorflow as kv

        kv.init()
        self._kv, self.rank, self.size = kv, kv.rank(), kv.size()

    def tape(self) -> Any:
        return self._kv.DistributedGradientTape(tf.GradientTape())

    def close(self) -> None:
        self._kv.shutdown()


class Strategy(Alone):
    """``MultiWorkerMirroredStrategy``, in which the optimizer adds up the ranks' gradients."""

    def __init__(self) -> None:
        super().__init__()
        cluster = {"worker": os.environ["BENCH_WORKERS"].split(",")}
        task = {"type": "worker", "index": self.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def scope(self) -> Any:
        return self._strategy.scope()

    def compiled(self, step: Any) -> Any:
        share = 1 / self.size
        return tf.function(lambda *batch: self._strategy.run(step, args=(*batch, share)))


class Training:
    """See front_ends_rank.Training."""

    def __init__(self, peer: Any, model: str) -> None:
        first = front_ends_rank.first_weights(model)
        with peer.scope():
            self._params = [[tf.Variable(value) for value in pair] for pair in first]
            self._optimizer = tf.keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
            self._optimizer.build(tf.nest.flatten(self._params))
        own = front_ends_rank.batches(model, peer.rank)
        self._batches = [(tf.constant(x), tf.constant(labels)) for x, labels in own]
        self._tape, self._count = peer.tape, 0
        self._step = peer.compiled(self._one_step)

    def _one_step(self, x: Any, labels: Any, share: float = 1.0) -> None:
        params = tf.nest.flatten(self._params)
        with self._tape() as tape:
            loss = share * loss_of(self._params, x, labels)
        gradients = tape.gradient(loss, params)
        self._optimizer.apply_gradients(zip(gradients, params, strict=True))

    def step(self) -> None:
        batch = self._batches[self._count % BATCHES]
        self._count += 1
        self._step(*batch)

    def weights(self) -> list[Any]:
        return [param.numpy() for param in tf.nest.flatten(self._params)]


if __name__ == "__main__":
    front_ends_rank.serve({"kolovod": Kolovod, "alone": Alone, "own": Strategy}, Training)

"""Train a small transformer on the characters of real text: Python's own standard library.

    kolovod run -np 2 python examples/mxnet_text.py
    python examples/mxnet_text.py                      # the same script as a single process

What makes a script distributed is marked [1] to [5]; everything else is ordinary Gluon.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import mxnet as mx
import numpy as np
import text_data
from mxnet import autograd, gluon

import kolovod.mxnet as kv

HEAD_WIDTH = 32
HELD_OUT_WINDOWS = 128  # of each process


class Layer(gluon.Block):
    """Attention to the characters before, and two dense layers."""

    def __init__(self, context: int, width: int) -> None:
        """One head for each 32 of ``width``."""
        super().__init__()
        self._heads = width // HEAD_WIDTH
        self._future = np.triu(np.full((1, context, context), -1e9), 1)
        dense = {"in_units": width, "flatten": False}
        with self.name_scope():
            self.first_norm = gluon.nn.LayerNorm(in_channels=width)
            self.query = gluon.nn.Dense(width, **dense)
            self.key = gluon.nn.Dense(width, **dense)
            self.value = gluon.nn.Dense(width, **dense)
            self.joined = gluon.nn.Dense(width, **dense)
            self.second_norm = gluon.nn.LayerNorm(in_channels=width)
            self.wide = gluon.nn.Dense(4 * width, activation="relu", **dense)
            self.narrow = gluon.nn.Dense(width, in_units=4 * width, flatten=False)

    def forward(self, hidden: mx.nd.NDArray) -> mx.nd.NDArray:
        """``hidden`` (batch, context, width) with what was found added."""
        normal = self.first_norm(hidden)
        query, key, value = (self._split(part(normal)) for part in self._parts())
        future = mx.nd.array(self._future, dtype=hidden.dtype)
        scores = mx.nd.batch_dot(query, key, transpose_b=True) / math.sqrt(HEAD_WIDTH)
        attended = mx.nd.batch_dot(mx.nd.softmax(mx.nd.broadcast_add(scores, future)), value)
        hidden = hidden + self.joined(self._together(attended))
        return hidden + self.narrow(self.wide(self.second_norm(hidden)))

    def _parts(self) -> tuple[gluon.nn.Dense, ...]:
        return self.query, self.key, self.value

    def _split(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        """One matrix (context, 32) for each window and head."""
        x = x.reshape((0, 0, self._heads, HEAD_WIDTH)).transpose((0, 2, 1, 3))
        return x.reshape((-3, 0, 0))

    def _together(self, x: mx.nd.NDArray) -> mx.nd.NDArray:
        x = x.reshape((-4, -1, self._heads, 0, 0)).transpose((0, 2, 1, 3))
        return x.reshape((0, 0, -3))


class Transformer(gluon.Block):
    """Predicts every next character of a window from those before it."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        """``width``: a multiple of 32."""
        super().__init__()
        count = len(text_data.ALPHABET)
        with self.name_scope():
            self.characters = gluon.nn.Embedding(count, width)
            self.positions = self.params.get("positions", shape=(1, context, width))
            self.layers = gluon.nn.Sequential()
            for _ in range(layers):
                self.layers.add(Layer(context, width))
            self.norm = gluon.nn.LayerNorm(in_channels=width)
            self.head = gluon.nn.Dense(count, in_units=width, flatten=False)

    def forward(self, windows: mx.nd.NDArray) -> mx.nd.NDArray:
        """Scores (batch, context, characters) of the next ones."""
        hidden = mx.nd.broadcast_add(self.characters(windows), self.positions.data())
        return self.head(self.norm(self.layers(hidden)))


def own_part(batch: Any) -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    """Of windows (count, length) this rank's, and the same ones one character further on.

    [2] Shard the data: all ranks draw alike, and each takes its own part.
    """
    own = batch[kv.rank() :: kv.size()]
    return mx.nd.array(own[:, :-1]), mx.nd.array(own[:, 1:])


def bits_of(net: Transformer, loss_of: Any, test: Any) -> float:
    """The bits per character of held out text, of all ranks' windows."""
    windows, following = own_part(test)
    mean = kv.allreduce(loss_of(net(windows), following).mean(), "held out").asscalar()
    return float(mean) / math.log(2)


def train(arguments: argparse.Namespace, workers: int, dtype: str = "float32") -> Transformer:
    """Train as ``workers`` processes do; this world may have as many ranks, or be a single one."""
    training, held_out = text_data.load_text(arguments.characters)
    batch, context = arguments.batch_size * workers, arguments.context
    windows = text_data.draw(training, (arguments.steps, batch), context, arguments.seed)
    test = text_data.draw(held_out, (HELD_OUT_WINDOWS * workers,), context, arguments.seed)
    mx.random.seed(arguments.seed + kv.rank())
    net = Transformer(context, arguments.layers, arguments.width)
    net.cast(dtype)
    net.initialize(mx.init.Xavier())
    # [5] Start equal: rank 0's values everywhere.
    kv.broadcast_parameters(net.collect_params())
    # [3] Scale the learning rate: Adam's steps bear the square root of the workers.
    rate = arguments.lr * math.sqrt(workers)
    # [4] Average the gradients: the last layer's travel while MXNet computes those before.
    trainer = kv.DistributedTrainer(
        net.collect_params(),
        "adam",
        {"learning_rate": rate},
        compression=getattr(kv.Compression, arguments.compression),
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    if kv.rank() == 0:
        count = sum(parameter.data().size for parameter in net.collect_params().values())
        size = f"{count:,} parameters, {len(training):,} characters"
        print(f"{size}, {kv.size()} process(es)", flush=True)
    started = time.perf_counter()
    for step, drawn in enumerate(windows, 1):
        trainer.set_learning_rate(rate * min(1.0, step / arguments.warmup))
        seen, following = own_part(drawn)
        with autograd.record():
            loss = loss_of(net(seen), following)
        loss.backward()
        trainer.step(len(seen))
        if step % arguments.report_every == 0 or step == arguments.steps:
            bits = bits_of(net, loss_of, test)
            pace = step * batch * context / (time.perf_counter() - started)
            if kv.rank() == 0:
                print(
                    f"step {step:4}/{arguments.steps}  {bits:5.3f} bits per character held out"
                    f"  {pace:9,.0f} characters/s",
                    flush=True,
                )
    return net


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = text_data.options(__doc__.splitlines()[0])
    parser.add_argument("--compression", choices=["none", "fp16"], default="none")
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse_arguments()
    # [1] Join the other processes; without the launcher this is a world of one.
    kv.init()
    train(arguments, kv.size())
    kv.shutdown()


if __name__ == "__main__":
    main()

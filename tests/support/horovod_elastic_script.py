"""A training by Horovod's elastic interface, to which things happen as its argument says.

Run by horovodrun: ``horovod_elastic_script.py torch PLAN FOLDER``. The plan is JSON, a list of
events ``{"batch": n, "do": what, ...}``, each of which happens once, when that many batches are
over: ``hosts`` (rank 0 writes ``text`` to FOLDER/hosts, which discovery prints, and waits until it
hears of a change), ``kill`` (the process with ``local`` rank on ``host`` kills itself), ``raise``
(it raises ``error``), ``lost`` (rank 0 raises HorovodInternalError).

Each batch adds a gradient of ones. A process that comes to the end prints one line of JSON: the
ranks of the worlds in which batches were done, and the weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BATCHES, PER_COMMIT = 40, 4
MOMENTUM = 0.5
HOST = os.environ.get("HOROVOD_HOSTNAME", "localhost")


class WithTorch:
    """SGD with momentum: the weights tell how often it has stepped, and from what state."""

    def __init__(self) -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.weights = torch.nn.Parameter(torch.full((3,), float(hvd.rank()), dtype=torch.float64))
        if hvd.rank() == 0:
            self.weights.data.zero_()
        self.model = torch.nn.Module()
        self.model.register_parameter("weights", self.weights)
        sgd = torch.optim.SGD([self.weights], 1.0, MOMENTUM)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters())
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, batch=0, sizes=[])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.weights.sum().backward()
        self.optimizer.step()

    def result(self) -> list[float]:
        return [float(weight) for weight in self.weights.detach()]


class WithoutFramework:
    """Horovod's common half, on arrays of NumPy."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        import numpy as np

        import kolovod.numpy as kv
        from horovod.common import basics
        from horovod.common.elastic import ObjectState, run_fn

        def reset() -> None:
            basics.shutdown()
            basics.init()

        basics.init()
        elastic = SimpleNamespace(run=lambda function: run_fn(function, reset))
        self.kv, self.ones = kv, np.ones(3)
        self.hvd: Any = SimpleNamespace(rank=basics.rank, size=basics.size, elastic=elastic)
        self.hvd.local_rank = basics.local_rank
        start = np.full(3, 0.0 if basics.rank() == 0 else -1.0)
        values = {"weights": start, "velocity": np.zeros(3), "batch": 0, "sizes": []}
        self.state = ObjectState(kv.broadcast_object, basics.rank, **values)

    def step(self) -> None:
        gradient = self.kv.allreduce(self.ones, "gradient")
        self.state.velocity = self.state.velocity * MOMENTUM + gradient
        self.state.weights = self.state.weights - self.state.velocity

    def result(self) -> list[float]:
        return [float(weight) for weight in self.state.weights]


class WithTensorflow:
    """A step that is traced once, and run in all worlds."""

    def __init__(self) -> None:
        import tensorflow as tf

        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd = hvd
        self.model, optimizer = _keras_model(tf.keras, hvd.rank())
        self.state = hvd.elastic.TensorFlowKerasState(self.model, optimizer, batch=0, sizes=[])
        ones = tf.ones((1, 3), tf.float64)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.model(ones, training=True))
            tape = hvd.DistributedGradientTape(tape)
            variables = self.model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        self.step = step

    def result(self) -> list[float]:
        return [float(weight) for weight in self.model.get_weights()[0].reshape(-1)]


class WithKeras:
    """``model.fit``, an epoch of one batch at a time, with Horovod's callbacks."""

    def __init__(self) -> None:
        import numpy as np
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd

        hvd.init()
        self.hvd, self.ones = hvd, np.ones((1, 3))
        self.model, optimizer = _keras_model(tf.keras, hvd.rank())
        optimizer = hvd.DistributedOptimizer(optimizer)
        self.model.compile(optimizer, loss=lambda target, found: tf.reduce_sum(found))
        self.state = hvd.elastic.KerasState(self.model, batch=0, sizes=[])

    def step(self) -> None:
        self.model.fit(self.ones, self.ones[:, :1], verbose=0)

    def result(self) -> list[float]:
        return [float(weight) for weight in self.model.get_weights()[0].reshape(-1)]


class WithKerasAlone(WithKeras):
    """The same by ``horovod.keras``, on the backend that KERAS_BACKEND names."""

    def __init__(self) -> None:
        import keras
        import numpy as np

        import horovod.keras as hvd

        hvd.init()
        self.hvd, self.ones = hvd, np.ones((1, 3))
        self.model, optimizer = _keras_model(keras, hvd.rank())
        optimizer = hvd.DistributedOptimizer(optimizer)
        self.model.compile(optimizer, loss=lambda target, found: keras.ops.sum(found))
        self.state = hvd.elastic.KerasState(self.model, batch=0, sizes=[])


def _keras_model(keras: Any, rank: int) -> tuple[Any, Any]:
    """Its kernel (3, 1) has gradients of one; and an optimizer."""
    keras.backend.set_floatx("float64")
    start = keras.initializers.Constant(float(rank))
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=start)
    model = keras.Sequential([keras.layers.Input((3,)), dense])
    return model, keras.optimizers.SGD(1.0, MOMENTUM)


KINDS = {
    "plain": WithoutFramework,
    "torch": WithTorch,
    "tensorflow": WithTensorflow,
    "keras": WithKeras,
    "keras on its backend": WithKerasAlone,
}


class Plan:
    """What happens, each once in a job."""

    def __init__(self, events: list[dict[str, Any]], folder: Path, work: Any) -> None:
        self._events = list(enumerate(events))
        self._folder = folder
        self._work = work

    def obey(self) -> None:
        hvd, state = self._work.hvd, self._work.state
        for number, event in self._events:
            mine = event.get("host") == HOST and event.get("local", 0) == hvd.local_rank()
            if "host" not in event:
                mine = hvd.rank() == 0
            if event["batch"] != state.batch or not mine:
                continue
            with contextlib.suppress(FileExistsError):
                (self._folder / f"happened.{number}").touch(exist_ok=False)
                getattr(self, f"_{event['do']}")(event)

    def _hosts(self, event: dict[str, Any]) -> None:
        fresh = self._folder / "fresh"
        fresh.write_text(event["text"])
        fresh.rename(self._folder / "hosts")
        deadline = time.monotonic() + 150  # processes that come import a framework first
        while self._work.state._host_messages.empty():
            assert time.monotonic() < deadline, "nobody said that the hosts have changed"
            time.sleep(0.01)

    def _kill(self, event: dict[str, Any]) -> None:
        os.kill(os.getpid(), 9)

    def _raise(self, event: dict[str, Any]) -> None:
        raise ValueError(event["error"])

    def _lost(self, event: dict[str, Any]) -> None:
        from horovod.common.exceptions import HorovodInternalError

        raise HorovodInternalError("a simulated failure")


def main() -> None:
    work = KINDS[sys.argv[1]]()
    plan = Plan(json.loads(sys.argv[2]), Path(sys.argv[3]), work)
    hvd, state = work.hvd, work.state
    entries = resets = 0

    def note_reset() -> None:
        nonlocal resets
        resets += 1

    state.register_reset_callbacks([note_reset])

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal entries
        entries += 1
        assert os.environ["HOROVOD_SIZE"] == str(hvd.size())
        if state.sizes[-1:] != [hvd.size()]:
            state.sizes = [*state.sizes, hvd.size()]
        while state.batch < BATCHES:
            plan.obey()
            work.step()
            state.batch += 1
            if state.batch % PER_COMMIT == 0:
                state.commit()

    train(state)
    facts = {"host": HOST, "rank": hvd.rank(), "sizes": state.sizes, "weights": work.result()}
    print(json.dumps({**facts, "entries": entries, "resets": resets}), flush=True)


if __name__ == "__main__":
    main()

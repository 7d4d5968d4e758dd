"""What trains in the processes of ``elastic_script.py``, by framework.

Each has one weight whose gradient is ``1 << slot`` in float64, added up over the ranks. So its
change in a step tells which slots took part, and what it is at the end is exactly the sum of the
changes; other weights make the step one of many gradients.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from typing import Any

import numpy as np

SLOT = int(os.environ.get("KOLOVOD_SLOT", "0"))
BIT = float(1 << SLOT)
WIDTH = 300


def digest(arrays: Any) -> str:
    """Of every bit."""
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


class OfFramework:
    """The rest of what ``elastic_script.py`` asks for."""

    redo, join = "repeat", "at_commit"
    tensors = None

    def distribute(self, slot: int) -> None:
        """Done as it was made."""

    def follow(self, state: Any) -> None:
        """Done by the state."""


class OfKeras(OfFramework):
    """A model that Keras compiles: by ``train_on_batch``."""

    def __init__(self, package: str = "keras") -> None:
        keras = importlib.import_module(package)
        kv = importlib.import_module("kolovod.keras")
        kv.init()
        keras.backend.set_floatx("float64")
        keras.utils.set_random_seed(SLOT)  # the weights are rank 0's all the same
        bits = keras.layers.EinsumDense("ab,bc->ac", 1, kernel_initializer="zeros")
        wide = keras.layers.EinsumDense("ab,bc->ac", WIDTH)
        given = keras.layers.Input((1,))
        self.model = keras.Model(given, [bits(given), wide(wide_in(keras, given))])
        self.bits = bits
        sgd = keras.optimizers.SGD(1.0)
        optimizer = kv.DistributedOptimizer(sgd, op=kv_sum())
        losses = [lambda y, p: p[:, 0], lambda y, p: keras.ops.mean(p * p, 1)]
        if package == "tf_keras":
            losses[1] = lambda y, p: keras.backend.mean(p * p, 1)
        self.model.compile(optimizer, losses)

    def values(self) -> dict[str, Any]:
        return {"model": self.model}

    def value(self) -> float:
        return float(np.asarray(self.bits.get_weights()[0])[0, 0])

    def step(self, state: Any, member: int = 0) -> int:
        before = self.value()
        rows = np.full((1, 1), BIT)
        self.model.train_on_batch(rows, [np.zeros((1, 1)), np.zeros((1, WIDTH))])
        return round(before - self.value())

    def result(self, state: Any) -> Any:
        return [self.value(), digest(self.model.get_weights())]


def wide_in(keras: Any, given: Any) -> Any:
    """``WIDTH`` columns of ``given``, between -1 and 1."""
    return keras.layers.Lambda(lambda x: x[:, :1] * 0 + np.linspace(-1, 1, WIDTH) / BIT)(given)


def kv_sum() -> Any:
    return importlib.import_module("kolovod.core.ops").Sum


class OfTensorFlow(OfFramework):
    """A ``tf.function`` with a tape, and variables."""

    def __init__(self, legacy: bool = False) -> None:
        import tensorflow as tf

        import kolovod.tensorflow as kv

        kv.init()
        self.module = tf.Module()
        self.module.bits = tf.Variable(tf.zeros([1], tf.float64))
        self.module.wide = tf.Variable(tf.random.normal([WIDTH, WIDTH], seed=SLOT))
        variables = [self.module.bits, self.module.wide]
        sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = kv.DistributedOptimizer(sgd, op=kv.Sum)

        def loss_of(rows: Any) -> Any:
            wide = tf.reduce_mean(tf.square(rows @ self.module.wide))
            return BIT * self.module.bits[0] + tf.cast(0.01 * wide, tf.float64)

        def by_tape(rows: Any) -> None:
            with kv.DistributedGradientTape(tf.GradientTape(), op=kv.Sum) as tape:
                loss = loss_of(rows)
            for v, slope in zip(variables, tape.gradient(loss, variables), strict=True):
                v.assign_sub(slope)

        def by_optimizer(rows: Any) -> None:
            optimizer.minimize(lambda: loss_of(rows), var_list=variables)

        self.tf = tf
        self.run = tf.function(by_optimizer if legacy else by_tape)

    def values(self) -> dict[str, Any]:
        return {"module": self.module}

    def step(self, state: Any, member: int = 0) -> int:
        before = float(self.module.bits[0])
        self.run(self.tf.random.stateless_normal([4, WIDTH], [state.step, SLOT]))
        return round(before - float(self.module.bits[0]))

    def result(self, state: Any) -> Any:
        return [float(self.module.bits[0]), digest([self.module.wide.numpy()])]


class OfJax(OfFramework):
    """A ``jax.jit`` that donates its parameters, with optax."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import kolovod.jax as kv

        kv.init()
        jax.config.update("jax_enable_x64", True)
        optimizer = kv.DistributedOptimizer(optax.sgd(1.0), op=kv.Sum)
        wide = jax.random.normal(jax.random.key(SLOT), (WIDTH, WIDTH), jnp.float32)
        self.params = {"bits": jnp.zeros(()), "wide": wide}
        self.opt_state = optimizer.init(self.params)
        self.jax = jax

        def step(params: Any, opt_state: Any, key: Any) -> Any:
            def loss_of(params: Any) -> Any:
                rows = jax.random.normal(key, (4, WIDTH), jnp.float32)
                wide = jnp.mean(jnp.square(rows @ params["wide"]))
                return BIT * params["bits"] + 0.01 * wide

            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            mean = kv.allreduce(loss, "loss")  # a step of its own
            return optax.apply_updates(params, updates), opt_state, mean

        self.run = jax.jit(step, donate_argnums=(0, 1))

    def values(self) -> dict[str, Any]:
        return {"params": self.params, "opt_state": self.opt_state, "losses": []}

    def step(self, state: Any, member: int = 0) -> int:
        before = float(state.params["bits"])
        key = self.jax.random.key(100 * state.step + SLOT)
        state.params, state.opt_state, loss = self.run(state.params, state.opt_state, key)
        state.losses.append(loss)
        return round(before - float(state.params["bits"]))

    def result(self, state: Any) -> Any:
        leaves = self.jax.tree.leaves((state.params, state.opt_state, state.losses))
        return [float(state.params["bits"]), digest(leaves)]


class OfMxnet(OfFramework):
    """A net of Gluon with a DistributedTrainer."""

    def __init__(self) -> None:
        import mxnet as mx

        import kolovod.mxnet as kv

        kv.init()
        mx.random.seed(SLOT)
        self.mx = mx
        self.net = mx.gluon.nn.HybridSequential()
        self.net.add(mx.gluon.nn.Dense(WIDTH, in_units=WIDTH), mx.gluon.nn.Dense(1, in_units=WIDTH))
        self.net.initialize(mx.init.Xavier())
        self.bits = mx.gluon.Parameter("bits", shape=(1,), dtype="float64", init="zeros")
        self.bits.initialize()
        self.parameters = mx.gluon.ParameterDict()
        self.parameters.update(self.net.collect_params())
        self.parameters._params["bits"] = self.bits
        options = {"learning_rate": 1.0}
        self.trainer = kv.DistributedTrainer(self.parameters, "sgd", options, op=kv.Sum)

    def values(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "trainer": self.trainer}

    def value(self) -> float:
        return float(self.bits.data().asscalar())

    def step(self, state: Any, member: int = 0) -> int:
        mx, before = self.mx, self.value()
        draw = np.random.default_rng([state.step, SLOT])
        rows = mx.nd.array(draw.normal(size=(4, WIDTH)), dtype="float32")
        with mx.autograd.record():
            wide = 0.01 * mx.nd.mean(mx.nd.square(self.net(rows)))
            loss = BIT * self.bits.data().sum()
        mx.autograd.backward([wide, loss])
        self.trainer.step(1)
        return round(before - self.value())

    def result(self, state: Any) -> Any:
        arrays = [parameter.data().asnumpy() for parameter in self.parameters.values()]
        return [self.value(), digest(arrays)]


KINDS = {
    "mxnet": OfMxnet,
    "keras": OfKeras,
    "tf_keras": lambda: OfKeras("tf_keras"),
    "tensorflow": OfTensorFlow,
    "tensorflow_v1": lambda: OfTensorFlow(legacy=True),
    "jax": OfJax,
}

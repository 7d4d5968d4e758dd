"""Rows of the exchange (exchanges.py) by TensorFlow, JAX and Keras, on ranks that are processes.

``Row.program`` says how a step is made: traced once, or outside of any program. What is traced once
must be traced once in all worlds of the row.
"""

from __future__ import annotations

import abc
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from compressors import ByTurns, SignsWithFeedback
from exchanges import RATE, Entries, Row, Taken, entering, own_gradients, start
from forked import KERAS_2

from kolovod.core import ops

Found = list[list[list[Taken]]]


class Program(abc.ABC):
    """One rank's training, in a framework; a subclass has what is particular to it."""

    def __init__(self, row: Row, rank: int, kv: Any) -> None:
        """``kv``: the front end."""
        self.row, self.rank, self.kv = row, rank, kv
        self.traced = 0

    @classmethod
    def of_rows(cls, rank: int, rows: list[Row]) -> Found:
        """What this rank, a process, comes to in each row."""
        return [cls.made(row, rank).all() for row in rows]

    @classmethod
    @abc.abstractmethod
    def made(cls, row: Row, rank: int) -> Program:
        """For one row; nothing is made before this process has been in a world."""

    def all(self) -> list[list[Taken]]:
        """By world and step; nothing in worlds that this rank is not in."""
        found: list[list[Taken]] = []
        enter, is_new = entering(self.row, self.rank), True
        for world, hosts in enumerate(self.row.worlds):
            found.append([])
            if self.rank >= len(hosts):
                continue
            enter(world)
            if is_new:
                self.make()
                is_new = False
            if world:
                self.begin_equal()
            for number, step in enumerate(self.row.steps):
                passes = own_gradients(self.row, world, number, step, self.rank)
                shown = [self.run(grads) for grads in passes][-1]
                found[-1].append(Taken(shown, self.weights()))
        assert self.traced <= self.most_traces, f"traced {self.traced} times: {self.row!r}"
        return found

    @property
    def most_traces(self) -> int:
        """How often a program may be traced, whatever worlds come."""
        return 1

    def compression(self, make: Callable[[Any], Any]) -> Any:
        """``make``: a tensor of an array."""
        stateful = {"signs": lambda: SignsWithFeedback(make), "by turns": ByTurns}
        name = self.row.compression
        return stateful[name]() if name in stateful else getattr(self.kv.Compression, name)

    @abc.abstractmethod
    def make(self) -> None:
        """Variables and the optimizer, in the first world."""

    @abc.abstractmethod
    def begin_equal(self) -> None:
        """As scripts do where ranks are new."""

    @abc.abstractmethod
    def run(self, grads: list[Any]) -> list[Any] | None:
        """One pass with these gradients; the combined ones, where they are shown."""

    @abc.abstractmethod
    def weights(self) -> list[Any]:
        """As arrays."""


class InTensorflow(Program):
    """``tape`` or ``optimizer``, each in a graph or eager."""

    @classmethod
    def made(cls, row: Row, rank: int) -> Program:
        """See Program."""
        return cls(row, rank, importlib.import_module("kolovod.tensorflow"))

    @property
    def most_traces(self) -> int:
        """See Program; TensorFlow traces twice where variables are made."""
        return 1 + self.row.program.startswith("optimizer")

    def make(self) -> None:
        """See Program."""
        import tensorflow as tf

        row, self.tf = self.row, tf
        self.variables = [tf.Variable(values) for values in start(row)]
        self.speeds = [tf.Variable(tf.zeros_like(v)) for v in self.variables]
        groups: Any = row.groups
        if isinstance(groups, tuple):
            groups = [[self.variables[index] for index in group] for group in groups]
        options = {
            "op": getattr(ops, row.op), "gradient_predivide_factor": row.predivide,
            "groups": groups, "sparse_as_dense": row.as_dense,
            "compression": self.compression(tf.constant),
        }  # fmt: skip
        self.tape_of = functools.partial(self.kv.DistributedGradientTape, **options)
        step = self._by_tape
        if row.program.startswith("optimizer"):
            train = tf.compat.v1.train
            plain = train.GradientDescentOptimizer(RATE)
            if row.momentum:
                plain = train.MomentumOptimizer(RATE, row.momentum)
            self.optimizer = self.kv.DistributedOptimizer(
                plain, backward_passes_per_step=row.passes, **options
            )
            self.optimizer._create_slots(self.variables)
            step = self._by_optimizer
        self.step = tf.function(step) if row.program.endswith("graph") else step

    def _loss(self, given: list[Any]) -> Any:
        terms = []
        for variable, grad in zip(self.variables, given, strict=True):
            if isinstance(grad, tuple):
                looked_up = self.tf.gather(variable, grad[0])
                terms.append(self.tf.reduce_sum(looked_up * grad[1]))
            else:
                terms.append(self.tf.reduce_sum(variable * grad))
        return self.tf.add_n([self.tf.cast(term, "float64") for term in terms])

    def _by_tape(self, given: list[Any]) -> list[Any]:
        self.traced += self.row.program.endswith("graph")
        with self.tape_of(self.tf.GradientTape()) as tape:
            loss = self._loss(given)
        gradients = tape.gradient(loss, self.variables)
        dense = [self.tf.convert_to_tensor(gradient) for gradient in gradients]
        for variable, speed, gradient in zip(self.variables, self.speeds, dense, strict=True):
            variable.assign_sub(RATE * speed.assign(self.row.momentum * speed + gradient))
        return dense

    def _by_optimizer(self, given: list[Any]) -> None:
        self.traced += self.row.program.endswith("graph")
        self.optimizer.minimize(lambda: self._loss(given), var_list=self.variables)

    def begin_equal(self) -> None:
        """See Program."""
        owned = [*self.variables, *self.speeds]
        if self.row.program.startswith("optimizer") and self.row.momentum:
            owned += [self.optimizer.get_slot(v, "momentum") for v in self.variables]
        self.kv.broadcast_variables(owned)

    def run(self, grads: list[Any]) -> list[Any] | None:
        """See Program."""
        constant = self.tf.constant
        given = [
            (constant(grad.indices), constant(grad.values))
            if isinstance(grad, Entries)
            else constant(grad)
            for grad in grads
        ]
        found = self.step(given)
        return None if found is None else [gradient.numpy() for gradient in found]

    def weights(self) -> list[Any]:
        """See Program."""
        return [variable.numpy() for variable in self.variables]


class InJax(Program):
    """``jitted`` or ``eager``."""

    @classmethod
    def made(cls, row: Row, rank: int) -> Program:
        """See Program."""
        return cls(row, rank, importlib.import_module("kolovod.jax"))

    def make(self) -> None:
        """See Program."""
        import jax
        import jax.numpy as jnp
        import optax

        row, self.jax = self.row, jax
        self.optimizer = self.kv.DistributedOptimizer(
            optax.sgd(RATE, momentum=row.momentum),
            self.compression(jnp.asarray),
            row.passes,
            getattr(ops, row.op),
            shard_state=row.sharded,
            gradient_predivide_factor=row.predivide,
        )
        self.params: Any = [jnp.asarray(values) for values in start(row)]

        def step(params: Any, state: Any, grads: Any) -> Any:
            self.traced += row.program == "jitted" and not row.sharded
            updates, state = self.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = jax.jit(step) if row.program == "jitted" else step
        self.state = self.optimizer.init(self.params)

    def begin_equal(self) -> None:
        """See Program."""
        self.params, self.state = self.kv.broadcast_pytree((self.params, self.state))

    def run(self, grads: list[Any]) -> list[Any] | None:
        """See Program."""
        given = [self.jax.numpy.asarray(grad) for grad in grads]
        self.params, self.state = self.step(self.params, self.state, given)
        return None

    def weights(self) -> list[Any]:
        """See Program."""
        return [np.array(each) for each in self.params]


class InKeras(Program):
    """``compiled`` or ``eager``, as ``fit`` has it, or ``applied``, of gradients at hand."""

    which = "tensorflow"

    @classmethod
    def made(cls, row: Row, rank: int) -> Program:
        """See Program."""
        return cls(row, rank, importlib.import_module("kolovod.keras"))

    def make(self) -> None:
        """See Program."""
        row = self.row
        self.keras = keras = importlib.import_module(
            KERAS_2 if self.which == "tf_keras" else "keras"
        )
        sgd = keras.optimizers.SGD(RATE, momentum=row.momentum)
        self.optimizer = self.kv.DistributedOptimizer(
            sgd, self.compression(keras.backend.constant if self.which == "tf_keras"
                                  else keras.ops.convert_to_tensor),
            row.passes, getattr(ops, row.op), gradient_predivide_factor=row.predivide,
            groups=row.groups,
        )  # fmt: skip
        self.model = _model_of(keras, self, row)
        eagerly = {"run_eagerly": True} if row.program == "eager" else {}
        self.model.compile(self.optimizer, lambda true, out: out, **eagerly)

    def begin_equal(self) -> None:
        """See Program."""
        self.kv.broadcast_model(self.model)

    def run(self, grads: list[Any]) -> list[Any] | None:
        """See Program."""
        if self.row.program != "applied":
            factors = np.concatenate([np.ravel(grad) for grad in grads])[None]
            self.model.train_on_batch(factors, np.zeros((1, 1), factors.dtype))
            return None
        variables = self.model.trainable_variables
        if self.which == "tf_keras":
            tensors = [self.keras.backend.constant(grad) for grad in grads]
            self.optimizer.apply_gradients(list(zip(tensors, variables, strict=True)))
        else:
            self.optimizer.apply(list(map(self.keras.ops.convert_to_tensor, grads)), variables)
        return None

    def weights(self) -> list[Any]:
        """See Program."""
        return [np.array(each) for each in self.model.get_weights()]


def _model_of(keras: Any, program: InKeras, row: Row) -> Any:
    """Its gradients are the numbers that it is given, one after the other."""
    total = getattr(keras, "ops", None) or importlib.import_module("tensorflow")
    add_up = getattr(total, "sum", None) or total.reduce_sum
    sizes = [math.prod(parameter.shape) for parameter in row.parameters]

    class Linear(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def build(self, shape: Any) -> None:
            for index, value in enumerate(start(row)):
                made = keras.initializers.Constant(value)
                weight = self.add_weight(shape=value.shape, name=f"w{index}", initializer=made)
                setattr(self, f"w{index}", weight)
            self.built = True

        def call(self, factors: Any) -> Any:
            terms, begin = [], 0
            for index, size in enumerate(sizes):
                flat = total.reshape(getattr(self, f"w{index}"), (1, size))
                terms.append(add_up(flat * factors[:, begin : begin + size], 1))
                begin += size
            return sum(terms[1:], terms[0])[:, None]

    return keras.Sequential([keras.layers.Input((sum(sizes),)), Linear()])


class InKerasOnTorch(InKeras):
    """Keras 3 on PyTorch."""

    which = "torch"


class InKerasOnJax(InKeras):
    """Keras 3 on JAX."""

    which = "jax"


class InKeras2(InKeras):
    """Keras 2."""

    which = "tf_keras"


KERAS = {each.which: each for each in (InKeras, InKerasOnTorch, InKerasOnJax, InKeras2)}

"""Horovod's state of a Keras training, for Keras 2 and 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from horovod.common.basics import rank
from horovod.common.elastic import ObjectState
from kolovod.errors import InvalidArgumentError
from kolovod.keras.framework_detection import backend_of, chosen
from kolovod.keras.functions import broadcast_variables, optimizer_variables, to_numpy
from kolovod.numpy import broadcast_object

__all__ = ["KerasState"]


class KerasState(ObjectState):
    """The weights of a model, what its optimizer keeps, and plain values.

    Variables stay where they are: they are overwritten. The states of random generators, and
    metrics, are no part of it.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """``model``: built. ``optimizer``: None for the one that it was compiled with, if it was.

        Raises ValueError for a model that is not built, and for Keras on JAX, where ``fit`` keeps
        the weights to itself.
        """
        if backend_of(chosen()) == "jax":
            raise InvalidArgumentError(
                "Keras on JAX keeps the weights to itself while model.fit runs, so they cannot be "
                "committed: set KERAS_BACKEND=tensorflow or torch"
            )
        if not model.built:
            raise InvalidArgumentError(
                f"{model!r} has no variables yet: call model.build(), or model(inputs) once"
            )
        self.model = model
        self.optimizer = optimizer
        self._copies: dict[int, npt.NDArray[Any]] = {}
        super().__init__(broadcast_object, rank, **kwargs)
        self._copy()

    def save(self) -> None:
        """See State; the copies are made into the memory of the last ones."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """See State."""
        for variable in self._variables():
            copy = self._copies.get(id(variable))
            if copy is not None:
                variable.assign(copy)
        super().restore()

    def sync(self) -> None:
        """See State."""
        broadcast_variables(self._variables(), 0)
        self._copy()
        super().sync()

    def _variables(self) -> list[Any]:
        optimizer = self.optimizer or getattr(self.model, "optimizer", None)
        built = [] if optimizer is None else optimizer_variables(optimizer, self.model)
        return [*self.model.weights, *built]

    def _copy(self) -> None:
        before, self._copies = self._copies, {}
        for variable in self._variables():
            value, old = to_numpy(variable), before.get(id(variable))
            if old is not None and (old.shape, old.dtype) == (value.shape, value.dtype):
                np.copyto(old, value)
                self._copies[id(variable)] = old
            else:
                self._copies[id(variable)] = np.array(value)

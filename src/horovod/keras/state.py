"""Horovod's state of a Keras training, for Keras 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod.common.basics import rank
from horovod.common.elastic import Kept, ObjectState
from kolovod.errors import FrontEndArgumentError
from kolovod.keras.elastic import forget_fit, written_back
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

        Raises ValueError for a model that is not built.
        """
        if not model.built:
            raise FrontEndArgumentError(
                f"{model!r} has no variables yet: call model.build(), or model(inputs) once"
            )
        self.model = model
        self.optimizer = optimizer
        self._kept_variables = _KeptVariables(self._variables, model)
        super().__init__(broadcast_object, rank, **kwargs)

    def _parts(self) -> Iterable[Kept]:
        """Weights, and what the optimizer keeps."""
        return (self._kept_variables,)

    def _variables(self) -> list[Any]:
        optimizer = self.optimizer or getattr(self.model, "optimizer", None)
        built = [] if optimizer is None else optimizer_variables(optimizer, self.model)
        return [*self.model.weights, *built]


class _KeptVariables(Kept):
    """Variables of Keras, of which there may be more later."""

    def __init__(self, variables: Callable[[], list[Any]], model: Any) -> None:
        """``variables()``: those that there are now, of ``model`` and what trains it."""
        self._variables = variables
        self._model = model
        self.copies: dict[int, npt.NDArray[Any]] = {}
        """By id of the variable; each is made into the memory of the last one."""
        self.save()

    def save(self) -> None:
        """Implement ``Kept.save``."""
        written_back(self._model)
        before, self.copies = self.copies, {}
        for variable in self._variables():
            value, old = to_numpy(variable), before.get(id(variable))
            if old is not None and (old.shape, old.dtype) == (value.shape, value.dtype):
                np.copyto(old, value)
                self.copies[id(variable)] = old
            else:
                self.copies[id(variable)] = np.array(value)

    def restore(self) -> None:
        """Implement ``Kept.restore``. A variable of which there is no copy stays as it is."""
        forget_fit(self._model)
        for variable in self._variables():
            copy = self.copies.get(id(variable))
            if copy is not None:
                variable.assign(copy)

    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        written_back(self._model)
        broadcast_variables(self._variables(), 0)
        self.save()

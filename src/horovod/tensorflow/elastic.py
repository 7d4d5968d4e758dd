"""Horovod's elastic interface for TensorFlow: ``hvd.elastic.run`` and its states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from horovod.common.basics import init, rank, shutdown
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.graph_errors import raising_horovods
from horovod.keras.state import KerasState
from horovod.tensorflow.functions import broadcast_object, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

R = TypeVar("R")


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Enter ``func(state, ...)`` again in each world; see horovod.common.elastic.run_fn."""

    def reset() -> None:
        shutdown()
        init()

    return run_fn(raising_horovods(func), reset)


class TensorFlowKerasState(KerasState):
    """See horovod.keras.elastic.KerasState. Of TensorFlow."""

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        """``backend``, Keras's module of that name, is of no use here. Raises ValueError."""
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, which are overwritten where they are, and plain values."""

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        """``variables``: None for all of the default graph of TensorFlow 1.

        ``session``: of that graph; None for the default one. Not needed where code is eager. Raises
        ValueError if there are no variables, or where one is needed no session.
        """
        is_eager = tf.executing_eagerly()
        given = tf.compat.v1.global_variables() if variables is None else list(variables)
        if not given:
            raise ValueError(
                "variables is empty: give the model's, there are none in the default graph"
            )
        self.variables: list[Any] = given
        self.session: Any = None if is_eager else session or tf.compat.v1.get_default_session()
        if not is_eager and self.session is None:
            raise ValueError("session is None, and there is no default one: give it")
        self._broadcast = None if is_eager else broadcast_variables(given, 0)
        self._copies: list[npt.NDArray[Any]] = []
        super().__init__(broadcast_object, rank, **kwargs)
        self._copy()

    def save(self) -> None:
        """See State; the copies are made into the memory of the last ones."""
        self._copy()
        super().save()

    def restore(self) -> None:
        """See State."""
        for variable, copy in zip(self.variables, self._copies, strict=True):
            if self.session is None:
                variable.assign(copy)
            else:
                variable.load(copy, self.session)
        super().restore()

    def sync(self) -> None:
        """See State."""
        self._take_first()
        self._copy()
        super().sync()

    @raising_horovods
    def _take_first(self) -> None:
        if self.session is None:
            broadcast_variables(self.variables, 0)
        else:
            self.session.run(self._broadcast)

    def _copy(self) -> None:
        if self.session is None:
            values = [variable.numpy() for variable in self.variables]
        else:
            values = self.session.run(self.variables)
        if not self._copies:
            self._copies = [np.array(value) for value in values]
        for copy, value in zip(self._copies, values, strict=True):
            np.copyto(copy, value)

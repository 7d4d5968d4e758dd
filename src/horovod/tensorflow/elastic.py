"""Horovod's elastic interface for TensorFlow: ``hvd.elastic.run`` and its states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from horovod.common.basics import rank
from horovod.common.elastic import Kept, ObjectState
from horovod.common.graph_errors import raising_horovods, run
from horovod.keras.state import KerasState
from horovod.tensorflow.functions import broadcast_object, broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowKerasState(KerasState):
    """The state of a Keras model of TensorFlow's; see ``horovod.keras.elastic.KerasState``."""

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
        ValueError if there are no variables, or no session where one is needed.
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
        self._kept_variables = _KeptVariables(given, self.session)
        super().__init__(broadcast_object, rank, **kwargs)

    def _parts(self) -> Iterable[Kept]:
        """The variables."""
        return (self._kept_variables,)


class _KeptVariables(Kept):
    """Variables of TensorFlow; their copies are made into the memory of the last ones."""

    def __init__(self, variables: list[Any], session: Any) -> None:
        """``session``: of TensorFlow 1; None where code is eager."""
        self._variables = variables
        self._session = session
        self._broadcast = None if session is None else broadcast_variables(variables, 0)
        self._copies = [np.array(value) for value in self._values()]

    def save(self) -> None:
        """Implement ``Kept.save``."""
        for copy, value in zip(self._copies, self._values(), strict=True):
            np.copyto(copy, value)

    def restore(self) -> None:
        """Implement ``Kept.restore``."""
        for variable, copy in zip(self._variables, self._copies, strict=True):
            if self._session is None:
                variable.assign(copy)
            else:
                variable.load(copy, self._session)

    @raising_horovods
    def sync(self) -> None:
        """Implement ``Kept.sync``."""
        if self._session is None:
            broadcast_variables(self._variables, 0)
        else:
            self._session.run(self._broadcast)
        self.save()

    def _values(self) -> list[npt.NDArray[Any]]:
        if self._session is None:
            return [variable.numpy() for variable in self._variables]
        return list(self._session.run(self._variables))

"""Keras's models and optimizers in the state of an elastic job."""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from kolovod.core.objects import Objects
from kolovod.core.world import current
from kolovod.elastic import share_by
from kolovod.elastic.independent_training import IndependentTraining
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError, MismatchError
from kolovod.keras.framework_detection import is_keras_3, keras_of
from kolovod.keras.functions import broadcast_model, broadcast_variables
from kolovod.private_apis.keras import forget_values_of_jax

__all__ = ["share_in_elastic_jobs"]


def share_in_elastic_jobs() -> None:
    """Let ``kolovod.elastic.State`` hold models and optimizers: ranks that join get rank 0's."""
    share_by(_is_variable, share_variable, within=True)
    share_by(_is_layer_or_metric, share_layer_or_metric, within=True)
    share_by(is_model, share_model, within=True, tensors=_tensors_of_torch)
    share_by(is_optimizer, share_optimizer, within=True)
    share_by(lambda value: isinstance(value, IndependentCallback), share_independent)


def _tensors_of_torch(model: Any) -> Iterable[Any]:
    """On PyTorch a model is one of its modules, too."""
    parameters = getattr(model, "parameters", None)
    return parameters() if callable(parameters) else ()


def is_model(value: Any) -> bool:
    """Return whether ``value`` is a model of either Keras, without importing one."""
    loaded = [sys.modules.get(name) for name in ("keras", "tf_keras")]
    kinds = tuple(keras.Model for keras in loaded if keras is not None)
    return isinstance(value, kinds)


def _is_variable(value: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and is_keras_3(keras) and isinstance(value, keras.Variable)


def _is_layer_or_metric(value: Any) -> bool:
    loaded = [sys.modules.get(name) for name in ("keras", "tf_keras")]
    found = [keras for keras in loaded if keras is not None]
    kinds = [kind for keras in found for kind in (keras.layers.Layer, keras.metrics.Metric)]
    return isinstance(value, tuple(kinds))


def share_variable(name: str, variable: Any) -> Any:
    """Give ``variable`` rank 0's value."""
    broadcast_variables([variable])
    return variable


def share_layer_or_metric(name: str, value: Any) -> Any:
    """Give a layer, or a metric, rank 0's weights."""
    if hasattr(value, "weights"):
        broadcast_model(value)
    else:
        broadcast_variables(value.variables)
    return value


def is_optimizer(value: Any) -> bool:
    """Return whether ``value`` is an optimizer of either Keras."""
    try:
        keras_of(value)
    except InvalidArgumentError:
        return False
    return True


def share_model(name: str, model: Any) -> Any:
    """``model`` with rank 0's weights, and its optimizer's state, also in the middle of ``fit``."""
    check_not_owned(name, model)
    written_back(model)
    broadcast_model(model)
    return model


def share_optimizer(name: str, optimizer: Any) -> Any:
    """``optimizer`` with the state of rank 0's. Raises MismatchError if only one is built."""
    check_not_owned(name, optimizer)
    variables = optimizer.variables
    variables = list(variables() if callable(variables) else variables)
    count = Objects(current).broadcast_object(len(variables), 0, f"elastic.{name}")
    if count != len(variables):
        how = "optimizer.build(model.trainable_variables)"
        if not is_keras_3(keras_of(optimizer)):
            how += ", or for a legacy one a step,"
        raise MismatchError(
            f"state.{name} is an optimizer with {len(variables)} variables, rank 0's has {count}: "
            f"call {how} before elastic.run, on all ranks; or put the compiled model into the "
            "state, which brings its optimizer"
        )
    broadcast_variables(variables)
    return optimizer


class IndependentCallback(IndependentTraining):
    """A callback by which ranks train independently, in the state in the place of its model."""

    @property
    @abstractmethod
    def owned(self) -> tuple[Any, ...]:
        """The model and the optimizer that it brings along in the current elastic job's state."""

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """True if this rank has steps of its own, which it keeps."""

    @abstractmethod
    def own_state(self) -> Any:
        """Return what a rank that joins needs beside the model with its optimizer."""

    @abstractmethod
    def take_own_state(self, state: Any) -> None:
        """Go on from ``own_state``."""


_independent: weakref.WeakSet[IndependentCallback] = weakref.WeakSet()


def note_independent(callback: IndependentCallback) -> None:
    """Refuse what ``callback`` owns as another value of a state."""
    _independent.add(callback)


def check_not_owned(name: str, value: Any) -> None:
    """Raise InvalidArgumentError for a value of a state that another one brings along."""
    for callback in list(_independent):
        if any(value is owned for owned in callback.owned):
            kind = type(callback).__name__
            raise FrontEndArgumentError(
                f"state.{name} belongs to the {kind} in the state, which brings its model and "
                f"optimizer along and leaves each rank its own: leave {name} out"
            )


def share_independent(name: str, callback: IndependentCallback) -> IndependentCallback:
    """Make ``callback`` a copy of rank 0's, with its model, unless it has steps of its own."""
    (model, *_), keeps = callback.owned, callback.has_begun
    written_back(model)
    broadcast_model(model, keeps=keeps)
    state = Objects(current).broadcast_object(callback.own_state(), 0, f"elastic.{name}")
    if not keeps:
        callback.take_own_state(state)
    return callback


def written_back(model: Any) -> None:
    """Have ``model`` hold what it has learned: on JAX ``fit`` keeps that elsewhere meanwhile."""
    write_back = getattr(model, "jax_state_sync", None)
    if write_back is not None:
        write_back()


def forget_fit(model: Any) -> None:
    """Have ``model`` hold what is written to it from now on: a ``fit`` was left by an error.

    On JAX its last values are still there, and would be written over what is restored.
    """
    forget_values_of_jax(model)

"""TensorFlow's variables and modules in the state of an elastic job, and Keras's there, too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kolovod.elastic import share_by
from kolovod.tensorflow.functions import broadcast_variables

__all__ = ["share_in_elastic_jobs"]


def share_in_elastic_jobs() -> None:
    """Let ``kolovod.elastic.State`` hold variables and modules: ranks that join get rank 0's."""
    share_by(lambda value: isinstance(value, tf.Module), share_module, within=True)
    share_by(lambda value: isinstance(value, tf.Variable), share_variable, within=True)
    share_by(
        lambda value: isinstance(value, tf.compat.v1.train.Optimizer),
        share_v1_optimizer,
        within=True,
    )
    share_by(_is_of_keras, share_by_keras, within=True)


def share_variable(name: str, variable: tf.Variable) -> tf.Variable:
    """``variable`` with rank 0's value."""
    broadcast_variables([variable])
    return variable


def share_module(name: str, module: tf.Module) -> tf.Module:
    """``module`` with rank 0's variables."""
    broadcast_variables(module.variables)
    return module


def share_v1_optimizer(name: str, optimizer: Any) -> Any:
    """``optimizer`` with rank 0's slots."""
    broadcast_variables(optimizer.variables())
    return optimizer


def share_by_keras(name: str, value: Any) -> Any:
    """A model or an optimizer of Keras, for a script that has not imported kolovod.keras."""
    from kolovod.keras import elastic as of_keras

    share = of_keras.share_model if of_keras.is_model(value) else of_keras.share_optimizer
    return share(name, value)


def _is_of_keras(value: Any) -> bool:
    if not any(cls.__module__.startswith(("keras.", "tf_keras.")) for cls in type(value).__mro__):
        return False
    from kolovod.keras import elastic as of_keras

    return of_keras.is_model(value) or of_keras.is_optimizer(value)

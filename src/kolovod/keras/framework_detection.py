"""The Keras that an object belongs to, and the framework with which that computes.

Two can be installed side by side: Keras 3 (``keras``), which runs on TensorFlow, PyTorch or JAX,
and Keras 2 (``tf_keras``, or ``keras`` before version 3), which is a part of TensorFlow.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from kolovod.errors import FrontEndArgumentError

BACKENDS = ("tensorflow", "torch", "jax")


def chosen() -> ModuleType:
    """The Keras of this process: what ``tf.keras`` is, or else what the script has imported.

    Raises ImportError when there is none, and when its backend is one that Kolovod does not know.
    """
    legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    only_legacy = "tf_keras" in sys.modules and "keras" not in sys.modules
    names = ["tf_keras", "keras"] if legacy or only_legacy else ["keras", "tf_keras"]
    for name in names:
        if importlib.util.find_spec(name) is not None:
            keras = importlib.import_module(name)
            if backend_of(keras) not in BACKENDS:
                raise ImportError(
                    f"Keras runs on {backend_of(keras)!r}: set KERAS_BACKEND to one of "
                    f"{', '.join(BACKENDS)} before it is imported"
                )
            return keras
    raise ImportError("Keras is not installed: pip install 'kolovod[keras]'", name="keras")


def is_keras_3(keras: ModuleType) -> bool:
    """Return whether ``keras`` is the one with backends."""
    return int(str(keras.__version__).split(".")[0]) >= 3


def backend_of(keras: ModuleType) -> str:
    """Return the name of the framework with which ``keras`` computes."""
    return str(keras.backend.backend()) if is_keras_3(keras) else "tensorflow"


class InOneKeras:
    """A callback, which works in models of the Keras only that the process has chosen."""

    def set_model(self, model: Any) -> None:
        """Set the model. Raises InvalidArgumentError for a model of the other Keras."""
        keras = chosen()
        if model is not None and not isinstance(model, keras.Model):
            name = type(self).__name__
            other = "1" if keras.__name__ == "keras" else "0"
            raise FrontEndArgumentError(
                f"{name} belongs to {keras.__name__} {keras.__version__}, {model!r} does not: set "
                f"TF_USE_LEGACY_KERAS={other} before Kolovod, TensorFlow and Keras are imported"
            )
        super().set_model(model)  # type: ignore[misc]  # that of keras.callbacks.Callback


def keras_of(optimizer: Any) -> ModuleType:
    """The Keras that ``optimizer`` is one of. Raises InvalidArgumentError if it is none."""
    for cls in type(optimizer).__mro__:
        keras = sys.modules.get(cls.__module__.split(".")[0])
        if keras is None or keras.__name__ not in ("keras", "tf_keras"):
            continue
        kinds = [keras.optimizers.Optimizer]
        if not is_keras_3(keras):
            kinds.append(keras.optimizers.legacy.Optimizer)
        if isinstance(optimizer, tuple(kinds)):
            return keras
    raise FrontEndArgumentError(
        f"optimizer is {optimizer!r}: give an optimizer of Keras, such as "
        "keras.optimizers.SGD(0.01)"
    )

"""Parts of Keras that its documentation does not promise, and ``kolovod.keras`` uses."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["SET_BY_SCALERS", "caller_itself", "forget_values_of_jax", "layers_of", "steps_done"]

SET_BY_SCALERS = ("loss_scale_factor", "_is_wrapped_by_loss_scale_optimizer")
"""The attributes that Keras 3's and Keras 2's LossScaleOptimizer set in the optimizer within."""


def caller_itself(depth: int) -> Any:
    """Return the object whose method is the caller ``depth`` above this one's, or None.

    A LossScaleOptimizer sets an attribute of the optimizer that it is given, and tells it nothing
    else.
    """
    return sys._getframe(depth + 1).f_locals.get("self")


def layers_of(model: Any) -> list[Any]:
    """Return ``model`` or layer and all layers within, those of layers of one's own included."""
    return list(model._flatten_layers())


def steps_done(optimizer: Any) -> Any:
    """Return the number of passes of an optimizer of Keras 3, a value of JAX.

    ``optimizer.iterations`` counts updates, which are fewer where gradients of several passes add
    up.
    """
    return optimizer._iterations.value


def forget_values_of_jax(model: Any) -> None:
    """Drop what ``fit`` on JAX keeps beside the model's variables, and would write over them."""
    if getattr(model, "_jax_state", None) is not None:
        model._jax_state = None

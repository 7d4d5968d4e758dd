"""Models from files, with their optimizers distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kolovod.keras.copies import plainly
from kolovod.keras.framework_detection import chosen
from kolovod.keras.optimizer import DistributedOptimizer, watch_copies


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """``keras.models.load_model``, with the optimizer, and its state, distributed.

    ``custom_optimizers``: classes of optimizers that Keras does not know. ``options``: arguments of
    ``DistributedOptimizer``, which a file does not keep: a model saved without Kolovod is read as
    well, and one saved with it is read by Keras alone. Every rank reads the file. Raises what the
    two functions raise.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    keras = chosen()
    watch_copies()
    with plainly():
        model = keras.models.load_model(filepath, custom_objects=known or None)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, **options)
    return model

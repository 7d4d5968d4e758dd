"""Copies of distributed optimizers: from configurations, files and pickles.

Keras makes a copy of an optimizer from its configuration, and knows nothing of us: a model that
``keras.models.load_model`` reads would train alone on each rank, without a word. So the name in a
configuration says that the optimizer was distributed. A Keras without Kolovod keeps it as a name.
Where Kolovod is in use, the copy has the name without that, and is distributed, too, or it warns
when it first steps among several ranks, where ``DistributedOptimizer`` had arguments that a
configuration cannot hold.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from kolovod.core.world import current, is_initialized
from kolovod.keras.framework_detection import is_keras_3

_USUAL = "_kolovod_distributed"
"""At the end of the name: by DistributedOptimizer without arguments."""
_OTHER = "_kolovod_distributed_with_arguments"

_seen: set[int] = set()
_plainly: ContextVar[bool] = ContextVar("plainly", default=False)


def marked(config: dict[str, Any], is_usual: bool) -> dict[str, Any]:
    """The configuration of a distributed optimizer."""
    if "name" in config:
        return {**config, "name": f"{config['name']}{_USUAL if is_usual else _OTHER}"}
    # Keras 2's LossScaleOptimizer has no name, and follows the one within.
    inner = config["inner_optimizer"]
    return {**config, "inner_optimizer": {**inner, "config": marked(inner["config"], is_usual)}}


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within this context copies are as the optimizers were before they were distributed."""
    token = _plainly.set(True)
    try:
        yield
    finally:
        _plainly.reset(token)


def watch(keras: ModuleType, distribute: Callable[[Any], Any]) -> None:
    """From now on the copies that ``keras`` makes are distributed by ``distribute``, or say so."""
    if id(keras) in _seen:
        return
    _seen.add(id(keras))
    if is_keras_3(keras):
        own = keras.mixed_precision.LossScaleOptimizer  # Keras 2's has what is within distributed
    else:
        own = keras.optimizers.legacy.Optimizer
    for kind in (keras.optimizers.Optimizer, own):
        kind.from_config = classmethod(_watched(kind.from_config.__func__, distribute))


def _watched(
    from_config: Callable[..., Any], distribute: Callable[[Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(from_config)
    def watched(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        name = config.get("name") if isinstance(config, dict) else None
        for end in (_USUAL, _OTHER):
            if isinstance(name, str) and name.endswith(end):
                config = {**config, "name": name.removesuffix(end)}
                made = from_config(cls, config, *args, **kwargs)
                return as_before(made, end == _USUAL, distribute)
        return from_config(cls, config, *args, **kwargs)

    return watched


def as_before(made: Any, is_usual: bool, distribute: Callable[[Any], Any]) -> Any:
    """``made``, a copy of a distributed optimizer: distributed, or what says that it is not."""
    is_distributed = hasattr(made, "_kolovod_base")
    if _plainly.get() or is_distributed or not is_initialized():
        return made
    if is_usual:
        return distribute(made)
    kind: Any = type(made)
    made.__class__ = _telling(kind)
    return made


@functools.cache
def _telling(base: type) -> type:
    """``base``, which says at its first step that it is not distributed, and is ``base`` then."""

    def tell(optimizer: Any) -> None:
        optimizer.__class__ = base
        if is_initialized() and current().size > 1:
            warnings.warn(
                f"this {base.__name__} is a copy of a DistributedOptimizer, and steps with this "
                "rank's own gradients, so that ranks train different models: give it to "
                "DistributedOptimizer with the arguments that the other one had, or read the "
                "model by kolovod.keras.load_model",
                stacklevel=4,
            )

    def telling(name: str) -> Callable[..., Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            tell(self)
            return getattr(self, name)(*args, **kwargs)

        return step

    methods = ("apply", "apply_gradients", "stateless_apply", "get_gradients")
    fields = {name: telling(name) for name in methods if hasattr(base, name)}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), {**fields, **names})

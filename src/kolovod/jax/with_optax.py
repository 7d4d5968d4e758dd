"""optax, which is imported when a transformation is made, not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from kolovod.errors import FrontEndArgumentError


def optax_for(what: str) -> Any:
    """The module optax. Raises ImportError, which says that ``what`` needs it and what does not."""
    try:
        return import_module("optax")
    except ImportError as error:
        raise ImportError(
            f"{error}; {what} a transformation of optax: install it, or call allreduce_pytree on "
            "what is to be averaged"
        ) from None


def check_transformation(label: str, given: Any) -> None:
    """Raise InvalidArgumentError, which calls it ``label``, for what is none of optax's."""
    if not isinstance(given, optax_for(f"{label} is").GradientTransformation):
        raise FrontEndArgumentError(
            f"{label} is a {type(given).__name__}: give an optax.GradientTransformation"
        )


def transformation(init: Callable[..., Any], update: Callable[..., Any], **attributes: Any) -> Any:
    """A transformation of optax's, a tuple of ``init`` and ``update``, with ``attributes``."""
    made = _kind()(init, update)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@cache
def _kind() -> Any:
    class Transformation(optax_for("it is").GradientTransformationExtraArgs):  # type: ignore[misc]
        pass  # a named tuple has no room for attributes, but a class made of it has

    return Transformation

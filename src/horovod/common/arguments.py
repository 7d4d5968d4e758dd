"""The arguments that Horovod's verbs have in all frameworks."""

from __future__ import annotations

import warnings

from horovod.common.basics import Average, Sum


def named(verb: str, name: str | None) -> str | None:
    """Return ``name`` with the verb's: different verbs may use one name at the same time."""
    return None if name is None else f"{verb}.{name}"


def op_of(average: bool | None, op: int | None) -> int:
    """The reduction. ``average``: Horovod's older way to say it. ValueError for both."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError(f"average={average} and op={op} say the same thing: give op only")
    warnings.warn("average is deprecated, use op instead", DeprecationWarning, stacklevel=3)
    return Average if average else Sum

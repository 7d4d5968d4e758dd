"""Horovod's keys of dictionaries for variables."""

from __future__ import annotations

from typing import Any

from kolovod.tensorflow.exchange import variable_of

__all__ = ["refs_to_vars", "vars_to_refs"]


def vars_to_refs(vars: Any) -> Any:
    """Return keys for dictionaries in place of variables; for a list a tuple of keys."""
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(variable) for variable in vars)
    return variable_of(vars).ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables of such keys; of a tuple a list."""
    if isinstance(refs, list | tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()

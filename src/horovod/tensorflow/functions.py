"""Horovod's helpers for starting equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from horovod.common.process_sets import global_process_set, group_of
from kolovod.tensorflow import allgather_object as _allgather_object
from kolovod.tensorflow import broadcast_object as _broadcast_object
from kolovod.tensorflow import broadcast_variables as _broadcast_variables
from kolovod.tensorflow.errors import raising_tensorflows


@raising_tensorflows
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite ``variables`` with those of ``root_rank``; ``inplace`` is how it is done anyway."""
    return _broadcast_variables(variables, root_rank, group_of(process_set))


@raising_tensorflows
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """``broadcast_variables``; returns the variables."""
    given = list(variables)
    _broadcast_variables(given, root_rank, group_of(process_set))
    return given


@raising_tensorflows
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """The root's ``obj``, on every rank; ``session`` is not needed."""
    return _broadcast_object(obj, root_rank, name, group_of(process_set))


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Callable[[Any], Any]:
    """``broadcast_object`` that takes only the object."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@raising_tensorflows
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Every rank's ``obj``, in rank order; ``session`` is not needed."""
    return _allgather_object(obj, name, group_of(process_set))

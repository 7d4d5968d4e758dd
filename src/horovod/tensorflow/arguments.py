"""The arguments that Horovod's verbs on TensorFlow's tensors share."""

from __future__ import annotations

import contextlib
import re
import warnings
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from kolovod.errors import FrontEndArgumentError
from kolovod.tensorflow.verbs import collectives

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(basics)
check_num_rank_power_of_2 = num_rank_is_power_2


@contextlib.contextmanager
def named(verb: str, name: str | None) -> Any:
    """Yield the name that Kolovod's verb is to be given.

    Different verbs may use one name at the same time. In a graph the name is a scope, as
    Horovod's is the node's: Kolovod calls an unnamed operation by its place in the graph, so one
    name may be there several times.
    """
    if name is None or tf.executing_eagerly():
        yield None if name is None else f"{verb}.{name}"
        return
    with tf.name_scope(re.sub(r"[^A-Za-z0-9_./\\-]", "_", f"{verb}.{name}").rstrip("/")):
        yield None


def check_adasum(op: int, group: Any) -> None:
    """Raise NotImplementedError, as Horovod does, if Adasum cannot do with so many ranks."""
    if op != basics.Adasum:
        return
    size = collectives.membership(group).size
    if not num_rank_is_power_2(size):
        raise NotImplementedError(
            f"op Adasum combines ranks in pairs of pairs: it needs 2, 4, 8, ... ranks, not {size}; "
            "use Average"
        )


def several(tensors: Any) -> list[Any]:
    """The tensors of a grouped verb. Raises ValueError for no list or tuple."""
    if not isinstance(tensors, list | tuple):
        raise FrontEndArgumentError(f"give a list of tensors, not {tensors!r}")
    return list(tensors)


def groups_of(num_groups: int, groups: Any) -> Any:
    """``groups``; ``num_groups`` is Horovod's older name of it."""
    if num_groups != 0:
        warnings.warn("num_groups is deprecated, use groups", DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups

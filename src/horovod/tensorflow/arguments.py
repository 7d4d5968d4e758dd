"""The arguments that Horovod's verbs on TensorFlow's tensors share."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import tensorflow as tf

from horovod.common.arguments import op_of
from horovod.common.util import num_rank_is_power_2
from kolovod.errors import FrontEndArgumentError

handle_average_backwards_compatibility = op_of
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


def several(tensors: Any) -> list[Any]:
    """The tensors of a grouped verb. Raises ValueError for no list or tuple."""
    if not isinstance(tensors, list | tuple):
        raise FrontEndArgumentError(f"give a list of tensors, not {tensors!r}")
    return list(tensors)

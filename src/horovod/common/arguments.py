"""The arguments that Horovod's functions have in all frameworks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from horovod.common import basics
from horovod.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from kolovod.errors import FrontEndArgumentError

op_of = get_average_backwards_compatibility_fun(basics)
"""The reduction, of (op, average): ``average`` is Horovod's older way to say it."""

_OLD_NAMES = {
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
    "network_interface": "network_interfaces",
}


def named(verb: str, name: str | None) -> str | None:
    """Return ``name`` with the verb's: different verbs may use one name at the same time."""
    return None if name is None else f"{verb}.{name}"


def check_adasum(op: int, group: Any, verbs: Any) -> None:
    """Raise NotImplementedError, as Horovod does, if Adasum cannot do with so many ranks."""
    if op != basics.Adasum:
        return
    size = verbs.membership(group).size
    if not num_rank_is_power_2(size):
        raise NotImplementedError(
            f"op Adasum combines ranks in pairs of pairs: it needs 2, 4, 8, ... ranks, not {size}; "
            "use Average"
        )


def groups_of(num_groups: int, groups: Any) -> Any:
    """``groups``; ``num_groups`` is Horovod's older name of it."""
    if num_groups != 0:
        warnings.warn("num_groups is deprecated, use groups", DeprecationWarning, stacklevel=3)
        return num_groups if groups is None else groups
    return groups


def layers_of(local_layers: Any, is_layer: Callable[[Any], bool]) -> list[Any]:
    """Return ``local_layers``, a layer or any iterable of them, as a list; ValueError for others.

    None is none.
    """
    if local_layers is None:
        return []
    is_one = is_layer(local_layers) or not isinstance(local_layers, Iterable)
    found = [local_layers] if is_one else list(local_layers)
    for layer in found:
        if not is_layer(layer):
            raise FrontEndArgumentError(f"local_layers contains {layer!r}: give layers of Keras")
    return found


def warn_of_old_names(**given: Any) -> None:
    """Warn the caller's caller of arguments that have another name today, where not None."""
    for old, value in given.items():
        if value is not None:
            new = _OLD_NAMES[old]
            warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)

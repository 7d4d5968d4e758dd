"""Starting equal: parameters and objects from one rank to all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import mxnet as mx

from kolovod.core.objects import Objects
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.agreement import agree
from kolovod.mxnet.frontend import check
from kolovod.mxnet.verbs import MxnetCollectives

Parameters: TypeAlias = "Mapping[str, Any] | mx.gluon.ParameterDict"
_DEFERRED = "not initialized before the first forward"


class Functions:
    """Has the functions for one world; ``kolovod.mxnet`` binds those for the process's own."""

    def __init__(self, verbs: MxnetCollectives) -> None:
        """``verbs``: on arrays."""
        self._verbs = verbs
        self._objects = Objects(verbs.world)

    def broadcast_parameters(
        self, params: Parameters, root_rank: int = 0, prefix: str | None = None
    ) -> None:
        """Overwrite ``params`` with those of ``root_rank``, in place.

        ``params``: ``net.collect_params()``, or a dict of arrays or Parameters by name. One whose
        shape is known only at the first forward (deferred initialization) is overwritten then, when
        it gets its values; every rank must get there. ``prefix`` goes before the names, to keep
        calls apart that ranks make in different orders.

        Raises InvalidArgumentError for other ``params``, for a Parameter without ``initialize()``,
        and for sparse arrays and dtypes that the engine does not know; MismatchError, on every
        rank, when names, shapes or dtypes differ between ranks.
        """
        label = f"{prefix or ''}parameter."
        named = {name: _arrays(name, value) for name, value in _items(params)}
        described = [
            (name, (arrays[0].shape, str(arrays[0].dtype)) if arrays else _DEFERRED)
            for name, arrays in named.items()
        ]
        agree(self._objects, described, "parameter", f"{label}names")
        for arrays in named.values():  # the same on all ranks
            check(arrays[0]) if arrays else None
        handles = [
            (arrays, self._verbs.broadcast_async_(arrays[0], root_rank, label + name))
            for name, arrays in named.items()
            if arrays
        ]
        for arrays, handle in handles:
            value = handle.wait()
            for other in arrays[1:]:  # on this rank's further devices
                value.copyto(other)
        for name, value in _items(params):
            if not named[name]:
                self._broadcast_when_initialized(value, root_rank, label + name)

    def _broadcast_when_initialized(
        self, parameter: mx.gluon.Parameter, root_rank: int, name: str
    ) -> None:
        """Have ``parameter`` begin with the values that it gets on ``root_rank``."""
        initialize = type(parameter)._init_impl

        def with_the_roots(data: mx.nd.NDArray, contexts: Any) -> None:
            del parameter._init_impl  # once
            initialize(parameter, self._verbs.broadcast(data, root_rank, name), contexts)

        parameter._init_impl = with_the_roots


def _items(params: Parameters) -> list[tuple[str, Any]]:
    """Name and value, in an order that is the same everywhere."""
    if not isinstance(params, Mapping | mx.gluon.ParameterDict):
        raise FrontEndArgumentError(
            f"params is a {type(params).__name__}: give net.collect_params() or a dict"
        )
    return sorted(params.items())


def _arrays(name: str, value: Any) -> list[mx.nd.NDArray]:
    """An array for each of this rank's devices; none of a Parameter that gets values later."""
    if isinstance(value, mx.nd.NDArray):
        return [value]
    if not isinstance(value, mx.gluon.Parameter):
        raise FrontEndArgumentError(
            f"params['{name}'] is a {type(value).__name__}, neither an array nor a Parameter; "
            "send other values with broadcast_object"
        )
    if value._deferred_init:
        return []
    if value._data is None:
        raise FrontEndArgumentError(
            f"params['{name}'] has no values: call initialize() before broadcast_parameters()"
        )
    return value.list_data()  # type: ignore[no-any-return]

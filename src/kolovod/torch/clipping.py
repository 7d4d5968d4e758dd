"""Clipping gradients: averaged first, then clipped, with nothing to call in between.

A rank whose backward has come to all parameters has the averages. One without a batch, say, gets
them in ``step`` only, and would clip nothing where the others do; and with ``shard_state`` a rank
has a part of them. PyTorch offers no place to step in, so its two functions are made to average the
gradients of the parameters that they are given first; that they do as soon as there is a
DistributedOptimizer in a world of several ranks, also one that was made in a world of one, and
nothing else about them changes.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from kolovod.core.ops import Max, Sum
from kolovod.core.world import World, when_entered
from kolovod.errors import FrontEndArgumentError
from kolovod.torch import rounds

_NAMES = ("clip_grad_norm_", "clip_grad_value_")


class Shards(Protocol):
    """Gradients of which each rank has a part."""

    def pieces_of(self, ids: set[int]) -> list[torch.Tensor]:
        """Return the pieces that this rank has of the parameters with these values of ``id``.

        It has their gradients. Pieces that other ranks have as well are among them.
        """
        ...

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Return whether ranks have pieces of ``parameter``."""
        ...

    def combined(
        self, ids: set[int], measure: Callable[[list[torch.Tensor]], torch.Tensor], op: int
    ) -> torch.Tensor:
        """Return ``op`` over ``measure(pieces)`` of each rank's pieces of these parameters.

        Each element counts once.
        """
        ...


_EXACT = torch.float32
"""The dtype in which norms are computed at least."""

_lock = threading.Lock()
_is_installed = False


def install() -> None:
    """Put our functions in place of PyTorch's, once: there is a world of several ranks."""
    global _is_installed
    with _lock:
        if not _is_installed:
            for name in _NAMES:
                _install(name)
            _is_installed = True


@when_entered
def _enter(world: World) -> None:
    """Let reducers enter the world: backward, or clipping, may be the first thing there."""
    for reducer in rounds.everyone() if world.size > 1 else []:
        reducer.enter_world()


def _install(name: str) -> None:
    """Put it inside the function if possible: for scripts that imported the function by name."""
    function = getattr(clip_grad, name)
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:  # PyTorch's own wrapper: no_grad
            cell.cell_contents = _settling(inner)
            return
    for module in (clip_grad, torch.nn.utils):
        setattr(module, name, _settling(function))


def _settling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            given = [parameters]
        else:
            given = list(parameters)
            # PyTorch warns of generators, and only of those, that yield nothing.
            is_generator = isinstance(parameters, types.GeneratorType)
            parameters = (parameter for parameter in given) if is_generator else given
        shards = _settle({id(parameter) for parameter in given})
        if shards:
            return _clip_shards(function, given, shards, args, kwargs)
        return function(parameters, *args, **kwargs)

    return clip


def _settle(ids: set[int]) -> list[Shards]:
    """Average these gradients, in order of creation, so that all ranks go alike.

    Returns the ``Shards`` of the optimizers whose gradients are in parts on the ranks.
    """
    found: list[Shards] = []
    for reducer in rounds.everyone():
        if reducer.owns(ids):
            reducer.settle()
            if reducer.shards is not None:
                found.append(reducer.shards)
    return found


def _clip_shards(
    function: Callable[..., Any],
    given: list[torch.Tensor],
    shards: list[Shards],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Clip pieces in the place of parameters; their norm is that of all ranks' pieces."""
    ids = {id(parameter) for parameter in given}
    pieces = [shard.pieces_of(ids) for shard in shards]
    whole = [p for p in given if not any(shard.is_of(p) for shard in shards)]
    everything = [*whole, *(piece for some in pieces for piece in some)]
    if function.__name__ != "clip_grad_norm_":
        # PyTorch's function fails where there is no gradient: with more ranks than elements this
        # rank may have no piece.
        has_any = any(tensor.grad is not None for tensor in everything)
        return function(everything, *args, **kwargs) if has_any else None
    given_by_name = inspect.signature(function).bind(given, *args, **kwargs)
    given_by_name.apply_defaults()
    options = given_by_name.arguments
    norm_type = float(options["norm_type"])
    if norm_type <= 0:
        raise FrontEndArgumentError(
            f"norm_type is {norm_type}: of gradients in parts on ranks (shard_state) give one "
            "above 0, or inf"
        )
    norms = [_norm_of(whole, norm_type)]
    for shard in shards:
        if math.isinf(norm_type):
            norms.append(shard.combined(ids, lambda some: _norm_of(some, norm_type), Max))
        else:
            power = shard.combined(ids, lambda some: _norm_of(some, norm_type) ** norm_type, Sum)
            norms.append(power ** (1.0 / norm_type))
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(torch.float32)
    if options["error_if_nonfinite"] and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped"
        )
    # As PyTorch does it: never scaled up, and without a division by zero.
    factor = torch.clamp(float(options["max_norm"]) / (total + 1e-6), max=1.0)
    for tensor in everything:
        if tensor.grad is not None:
            tensor.grad.mul_(factor.to(tensor.device))
    return total.to(given[0].device)


def _norm_of(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of the gradients in float64, in host memory."""
    norms = [
        torch.linalg.vector_norm(t.grad, norm_type, dtype=torch.promote_types(t.dtype, _EXACT))
        for t in tensors
        if t.grad is not None
    ]
    each = torch.stack([norm.to("cpu", torch.float64) for norm in norms] or [torch.tensor(0.0)])
    norm: torch.Tensor = torch.linalg.vector_norm(each.double(), norm_type)
    return norm

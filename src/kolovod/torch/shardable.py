"""Which optimizers can step with a part of the parameters, tried with small ones."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import NOTHING
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch.wrapping import plain_copy


def check_shardable(optimizer: torch.optim.Optimizer, spec: ReduceSpec) -> None:
    """Raise InvalidArgumentError for what gradients in parts cannot be combined with."""
    if spec.compressor is not NOTHING or spec.choices:
        raise FrontEndArgumentError(
            "shard_state scatters gradients as they are: leave compression at "
            "Compression.none, and out of the job's settings (--compression, "
            "KOLOVOD_COMPRESSION)"
        )


def stepped_as_wholes(
    optimizer: torch.optim.Optimizer, among: Collection[int] | None = None
) -> set[int]:
    """Return the ``id`` of the parameters that the optimizer needs as a whole for their step.

    Others may be cut into pieces. ``among``: of the groups that have one of these; None: of all.
    Raises InvalidArgumentError where it steps with several parameters at once.
    """
    found: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        ids = {id(parameter) for parameter in group["params"]}
        if not ids or (among is not None and ids.isdisjoint(among)):
            continue
        pieces_differ = _difference(optimizer, group, _in_pieces(group))
        if not pieces_differ:
            continue
        wholes_differ = _difference(optimizer, group, _one_by_one(group))
        if wholes_differ:
            raise FrontEndArgumentError(
                "shard_state gives each rank pieces of the parameters, or some of them, which "
                f"{_kind(optimizer).__name__} (group {number}) cannot step with: of pieces "
                f"{pieces_differ}; of one parameter without the others {wholes_differ}; use an "
                "optimizer that steps with each element, or each parameter, by itself, as SGD, "
                "AdamW and Muon do, or no shards"
            )
        found |= ids
    return found


_Trial = tuple[list[torch.Tensor], list[list[torch.Tensor]]]
"""Parameters of one optimizer; and the same values as those of several, which step alone."""


def _in_pieces(group: dict[str, Any]) -> _Trial:
    values = _values((6, 8), group)
    flat = values.view(-1)
    return [values], [[flat[a:b]] for a, b in ((0, 5), (5, 21), (21, 48))]


def _one_by_one(group: dict[str, Any]) -> _Trial:
    """Two parameters of each number of dimensions that the group has."""
    numbers = sorted({parameter.dim() for parameter in group["params"] if not is_lazy(parameter)})
    shapes = [(6, 8, 2, 2, 2, 2)[:number] for number in numbers]
    shapes += [(8, 6, 2, 2, 2, 2)[:number] for number in numbers]
    values = [_values(shape, group) * (place + 1) for place, shape in enumerate(shapes)]
    return values, [[each] for each in values]


def _values(shape: tuple[int, ...], group: dict[str, Any]) -> torch.Tensor:
    device = group["params"][0].device
    return torch.linspace(-1.0, 1.0, math.prod(shape), device=device).view(shape)


def _difference(optimizer: torch.optim.Optimizer, group: dict[str, Any], trial: _Trial) -> str:
    """Return how three steps of the trial's parameters differ from those of its parts; "": not."""
    together, apart = trial
    try:
        expected = _stepped(optimizer, group, together)
        stepped = torch.cat([_stepped(optimizer, group, values) for values in apart])
        is_alike = torch.allclose(expected, stepped, rtol=1e-4, atol=1e-6)
        return "" if is_alike else "its step is another"
    except Exception as error:  # whatever an optimizer says to vectors, or to no closure
        return f"its step fails: {error}"


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return what three steps of such an optimizer make of ``values``, flat."""
    parameters = [each.clone().requires_grad_() for each in values]
    tried = {**group, "params": parameters}
    if not isinstance(tried.get("lr"), torch.Tensor) and not tried.get("lr"):
        tried["lr"] = 0.1
    made: Any = _like(optimizer, tried)
    made._kolovod_is_trial = True
    for step in range(3):
        # No function like cos: PyTorch's first one in a process may be wrong where several
        # threads call it at once.
        for parameter, each in zip(parameters, values, strict=True):
            parameter.grad = each * each * (step + 2) - each
        made.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the optimizer, as it was before it was distributed."""
    return getattr(optimizer, "_kolovod_base", type(optimizer))


def _like(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer of the same class, without a state, with ``group`` only."""
    kind: Any = _kind(optimizer)
    names = inspect.signature(kind).parameters
    try:
        made: torch.optim.Optimizer = kind(
            **{key: value for key, value in group.items() if key in names}
        )
        return made
    except Exception:  # whatever else the class wants to be given
        state = {"defaults": optimizer.defaults, "state": defaultdict(dict)}
        return plain_copy(kind, {**state, "param_groups": [group]})

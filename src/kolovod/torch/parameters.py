"""The parameters of an optimizer by name, and which of them want a gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from kolovod.errors import FrontEndArgumentError, InvalidArgumentError
from kolovod.torch.frontend import refuse_nested
from kolovod.torch.in_parts import InParts
from kolovod.torch.parts import part_of

Named = tuple[str | None, torch.Tensor]
"""A name of None: not known, which is an error as soon as the parameter wants a gradient."""


class Parameters:
    """Parameters that want a gradient, known by an index; and those that do not yet."""

    def __init__(self) -> None:
        """Begin without any."""
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.frozen: list[Named] = []
        self.lent: dict[int, Any] = {}
        """The reducer of a newer optimizer, which combines this gradient, by index."""
        self.bytes = 0
        """The bytes of the parameters that want a gradient."""

    def __len__(self) -> int:
        """Return the number of parameters that want a gradient."""
        return len(self.names)

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a parameter has; None where it is averaged and in parts."""
        own = self.tensors[index].grad
        return None if isinstance(own, InParts) else own

    def add(self, named: Iterable[Named]) -> None:
        """Take more. They are frozen until ``thaw`` finds that they want a gradient."""
        named = list(named)
        for name, parameter in named:
            refuse_nested(parameter, "a parameter" if name is None else f"the parameter '{name}'")
        self.frozen += named

    def thaw(self) -> range:
        """Take those that want a gradient by now; return their indices."""
        first, named = len(self.names), self.frozen
        self.frozen = [pair for pair in named if pair[0] is None or not _wants(pair[1])]
        wanted = [(name, p) for name, p in named if name is not None and _wants(p)]
        self.names += [name for name, _ in wanted]
        self.tensors += [parameter for _, parameter in wanted]
        self.bytes += sum(p.numel() * p.element_size() for _, p in wanted)
        return range(first, len(self.names))

    def without_name(self) -> list[InvalidArgumentError]:
        """Return an error for each parameter that wants a gradient and has no name."""
        return [
            FrontEndArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} wants a gradient now, but "
                "named_parameters did not name it: pass the frozen parameters' names too"
            )
            for _, parameter in self.frozen
            if _wants(parameter)
        ]

    def digest(self) -> bytes:
        """Return a hash of the names and shapes of the parameters that are not frozen."""
        details = sorted(self.details(range(len(self))))
        return hashlib.blake2b(repr(details).encode(), digest_size=8).digest()

    def details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        """Return the names and shapes, which must be the same on all ranks."""
        return [(self.names[index], tuple(self.tensors[index].shape)) for index in indices]


def _wants(parameter: torch.Tensor) -> bool:
    """Return whether it wants a gradient; one of a lazy module has no shape before a forward."""
    return parameter.requires_grad and not is_lazy(parameter)


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """The name of each parameter, by its ``id``; empty when none were given."""
    if named_parameters is None:
        return {}
    names: dict[int, str] = {}
    owners: dict[str, int] = {}
    for item in named_parameters:
        if not (
            isinstance(item, tuple)
            and len(item) == 2
            and isinstance(item[0], str)
            and isinstance(item[1], torch.Tensor)
        ):
            raise FrontEndArgumentError(
                f"named_parameters contains a {type(item).__name__} instead of (name, parameter); "
                "pass model.named_parameters()"
            )
        name, parameter = item
        if owners.setdefault(name, id(parameter)) != id(parameter):
            raise FrontEndArgumentError(
                f"named_parameters has two parameters named '{name}'; with several models, put the "
                "model's name in front of each"
            )
        names[id(parameter)] = name
    missing = [
        f"group {g} parameter {i} of shape {tuple(parameter.shape)}"
        for g, group in enumerate(optimizer.param_groups)
        for i, parameter in enumerate(group["params"])
        if parameter.requires_grad and id(parameter) not in names
    ]
    if missing:
        raise FrontEndArgumentError(
            f"named_parameters lacks {len(missing)} parameter(s) of the optimizer: "
            + ", ".join(missing[:5])
        )
    return names


class Roll:
    """Which parameters an optimizer has, whoever puts one into its ``param_groups``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters that ``optimizer`` has now."""
        self._ids = self._now(optimizer.param_groups)
        self._known = {id(p): p for group in optimizer.param_groups for p in group["params"]}

    def new(
        self, groups: list[dict[str, Any]], names: Mapping[int, str], taken: Collection[str]
    ) -> list[Named]:
        """Return the parameters that it has got since. It costs little to ask in each step.

        ``names``: see ``names_of_group``. ``taken``: names that others have.
        """
        ids = self._now(groups)
        if ids == self._ids:
            return []
        self._ids = ids
        found: list[Named] = []
        for place, group in enumerate(groups):
            for parameter, (name, part) in zip(
                group["params"], names_of_group(groups, place, names), strict=True
            ):
                if id(parameter) in self._known:
                    continue
                self._known[id(parameter)] = parameter
                while name in taken:  # that of the parameter which it has replaced
                    name = f"{name}, replaced"
                found.append((name, part))
        return found

    @staticmethod
    def _now(groups: list[dict[str, Any]]) -> list[int]:
        return [id(parameter) for group in groups for parameter in group["params"]]


def names_of_group(
    groups: list[dict[str, Any]], group: int, names: Mapping[int, str]
) -> list[Named]:
    """Return the parameters of ``groups[group]``, of sharded ones the parts that this rank has.

    ``names``: by ``id``; empty: the places are names. A frozen one that it lacks has the name None.
    """
    parameters = groups[group]["params"]
    places = [
        None if names and not parameter.requires_grad else f"{group}.{i}"
        for i, parameter in enumerate(parameters)
    ]
    return [
        (names.get(id(p), place), part_of(p)) for p, place in zip(parameters, places, strict=True)
    ]

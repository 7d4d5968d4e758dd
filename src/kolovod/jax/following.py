"""Values are followed through a program of JAX, to see what becomes of which array of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from kolovod.jax.primitive import primitive


def operations(jaxpr: Jaxpr) -> list[Any]:
    """Return what a program does, whatever the shapes: its operations and scalar constants."""
    return [
        (
            equation.primitive.name,
            [
                repr(v.val)
                for v in equation.invars
                if isinstance(v, Literal) and np.ndim(v.val) == 0
            ],
            [operations(inner) for inner in programs(equation)],
        )
        for equation in jaxpr.eqns
    ]


def communicates(jaxpr: Jaxpr) -> bool:
    """Return whether a program has an operation among ranks."""
    return any(
        equation.primitive is primitive or any(map(communicates, programs(equation)))
        for equation in jaxpr.eqns
    )


def programs(equation: Any) -> list[Jaxpr]:
    """The programs that an operation runs."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, Jaxpr):
                found.append(each)
    return found


class Followed:
    """A record of what was seen when the values of arrays were followed through a program.

    Sets of arrays are numbers here, with a bit for each.
    """

    def __init__(self) -> None:
        self.mixed = 0
        """The arrays whose elements depend on other elements of one of them."""
        self.how = ""
        """The place where that was seen first; "": none."""
        self.joined: list[tuple[int, str]] = []
        """The sets of several arrays that a value depends on, each with the operation."""

    def outputs(self, jaxpr: Jaxpr, given: Sequence[int]) -> list[int]:
        """Return the arrays that each output depends on; ``given``: those of each input."""
        made = dict(zip(jaxpr.invars, given, strict=True))
        for equation in jaxpr.eqns:
            of = [0 if isinstance(var, Literal) else made.get(var, 0) for var in equation.invars]
            if not any(of):
                continue
            for var, arrays in zip(equation.outvars, self._results(equation, of), strict=True):
                made[var] = arrays
                if arrays.bit_count() > 1:
                    self.joined.append((arrays, equation.primitive.name))
        return [0 if isinstance(var, Literal) else made.get(var, 0) for var in jaxpr.outvars]

    def _mix(self, arrays: int, how: str) -> None:
        self.mixed |= arrays
        self.how = self.how or how

    def _results(self, equation: Any, of: list[int]) -> list[int]:
        """Return the arrays that each output of an operation depends on."""
        name, inner = equation.primitive.name, programs(equation)
        if name == "cond":
            if of[0]:
                self._mix(of[0], "a condition of its step depends on elements")
            branches = [self.outputs(branch, of[1:]) for branch in inner]
            return [of[0] | _all(outputs) for outputs in zip(*branches, strict=True)]
        if name == "while":
            return self._of_while(equation.params, of)
        if name == "scan":
            return self._of_scan(equation.params, inner[0], of)
        if inner and len(inner[0].invars) == len(of):
            return self.outputs(inner[0], of)
        arrays = _all(of)
        shapes = {var.aval.shape for var, each in zip(equation.invars, of, strict=True) if each}
        shapes |= {var.aval.shape for var in equation.outvars}
        if len(shapes) > 1:
            self._mix(arrays, f"its step mixes elements ({name})")
        return [arrays] * len(equation.outvars)

    def _of_while(self, params: Any, of: list[int]) -> list[int]:
        consts, own = params["cond_nconsts"], params["body_nconsts"]
        condition, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        start = consts + own
        carried, _ = self._carried(body, of[consts:start], of[start:])
        (asked,) = self.outputs(condition, [*of[:consts], *carried])
        if asked:
            self._mix(asked, "a condition of its step depends on elements")
            carried, _ = self._carried(body, of[consts:start], [asked | each for each in carried])
        return carried

    def _of_scan(self, params: Any, body: Jaxpr, of: list[int]) -> list[int]:
        consts, count = params["num_consts"], params["num_carry"]
        rows = of[consts + count :]
        carried, made = self._carried(body, of[:consts], of[consts : consts + count], rows)
        if _all(made) and not any(rows):
            self._mix(_all(made), "its step gathers elements in a loop")
        return [*carried, *made]

    def _carried(
        self, body: Jaxpr, constant: list[int], carried: list[int], rows: Sequence[int] = ()
    ) -> tuple[list[int], list[int]]:
        """The arrays that a loop's values depend on after any number of rounds, and its rows."""
        while True:
            results = self.outputs(body, [*constant, *carried, *rows])
            after = [a | b for a, b in zip(carried, results, strict=False)]
            if after == carried:
                return carried, results[len(carried) :]
            carried = after


def _all(sets: Sequence[int]) -> int:
    """The union."""
    union = 0
    for each in sets:
        union |= each
    return union

"""The loops that a training step is in, also through the functions that a script calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst

from kolovod.migrate.script import Loop, Script

__all__ = ["EnclosingLoop", "callers_of", "chains", "functions_of", "seen_from"]

_DEPTH = 5


@dataclass(frozen=True)
class EnclosingLoop:
    """A loop, and the calls through which one comes from it to a step, the innermost first."""

    loop: Loop
    calls: tuple[cst.Call, ...]


def chains(script: Script, node: cst.CSTNode, depth: int = _DEPTH) -> list[list[EnclosingLoop]]:
    """Return, for each way to come to ``node``, the loops around it, from inside to outside."""
    own = [EnclosingLoop(loop, ()) for loop in script.loops_around(node)]
    function = script.function_of(node)
    sites = script.call_sites(function) if function is not None and depth else []
    found = []
    for site in sites:
        for outer in chains(script, site, depth - 1):
            found.append([*own, *(EnclosingLoop(each.loop, (site, *each.calls)) for each in outer)])
    return found or [own]


def seen_from(script: Script, value: cst.BaseExpression, place: EnclosingLoop) -> str:
    """Return the text for ``value``, of the step's function, at an outer loop; "": none."""
    for call in place.calls:
        function = script.called(call)
        if function is None:
            return ""
        root = value
        while isinstance(root, cst.Attribute | cst.Subscript):
            root = root.value
        if not isinstance(root, cst.Name):
            return ""
        names = [each.name.value for each in function.params.params]
        if root.value in names:
            if names[0] == root.value and root.value == "self":
                receiver = call.func.value if isinstance(call.func, cst.Attribute) else None
                if receiver is None or script.code(receiver) != "self":
                    return ""
                continue
            if root is not value:
                return ""
            given = script.given(call, function, root.value)
            if given is None:
                return ""
            value = given
        elif script.assignments(root.value, function):
            return ""
    return script.code(value) if isinstance(value, cst.Name | cst.Attribute | cst.Subscript) else ""


def callers_of(script: Script, found: Iterable[cst.CSTNode]) -> set[cst.FunctionDef | None]:
    """Return the functions with these nodes, and those that call them."""
    functions: set[cst.FunctionDef | None] = set()
    todo: list[cst.FunctionDef | None] = [script.function_of(node) for node in found]
    while todo:
        function = todo.pop()
        if function in functions:
            continue
        functions.add(function)
        if function is not None:
            todo += [script.function_of(site) for site in script.call_sites(function)]
    return functions


def functions_of(script: Script, found: Iterable[cst.CSTNode]) -> set[cst.FunctionDef | None]:
    """Return the functions with these nodes, and those that call them or are called by them."""
    functions = callers_of(script, found)
    for function in [each for each in functions if each is not None]:
        for call in script.nodes(function, cst.Call):
            if (called := script.called(call)) is not None:
                functions.add(called)
    return functions

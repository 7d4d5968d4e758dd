"""Loops that make their batches themselves: each rank takes every size-th batch of them."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.loops import EnclosingLoop
from kolovod.migrate.random_numbers import draw_apart
from kolovod.migrate.schedules import divide_counts
from kolovod.migrate.script import Script, attribute_call

__all__ = ["share_batches"]

_PARTS = ("array_split", "chunk", "reshape", "split")
"""Functions that make a list or an array of batches."""


def share_batches(edits: Edits, way: list[EnclosingLoop]) -> None:
    """Give each rank its own part of the batches, or say how; ``way``: the loops around a step."""
    script, kv = edits.script, edits.kv
    loop = way[0].loop if way else None
    if loop is not None and loop in edits.places:
        return  # another step is in the same loop
    arrays: list[str] = []
    if isinstance(loop, cst.For):
        arrays = _arrays_of(script, loop)
        made = _batches(script, loop.iter)
        ranges = loop.iter if isinstance(loop.iter, cst.Call) and arrays else None
        if ranges is not None and script.name(ranges) == "builtins.range":
            _stride(edits, ranges)
            divide_counts(edits, arrays, [each.value for each in ranges.args[2:]])
        for call in made:
            text = f"(group[{kv}.rank()] for group in zip(*[iter(x)] * {kv}.size()))"
            _wrap(edits, call, text)
            given = [each.value for each in call.args]
            divide_counts(edits, map(script.code, given), given)
        if made or (ranges is not None and ranges in edits.places):
            edits.change(loop, lambda new: new)
            edits.why(
                loop,
                f"each rank takes every {kv}.size()-th batch, all equally many; all ranks' "
                f"together are {kv}.size() times as large",
            )
            return
    if draw_apart(edits, way):
        return
    names = ", ".join(arrays or ["x", "y"])
    rows = ", ".join(f"{each}[{kv}.rank() :: {kv}.size()]" for each in arrays or ["x", "y"])
    edits.need(
        loop,
        "each rank must train on its own part of the data: "
        f"{names} = {rows}, cut to equally many rows on all ranks",
    )


def _stride(edits: Edits, call: cst.Call) -> None:
    """Let ranks take turns in a range: of starts of batches, or of numbers of batches."""
    script, kv = edits.script, edits.kv
    codes = [script.code(each.value) for each in call.args]
    start, stop, step = {1: ["0", *codes, "1"], 2: [*codes, "1"], 3: codes}[len(codes)]
    if step == "1" and start == "0":
        whole = stop if stop.replace("_", "").isalnum() else f"({stop})"
        text = f"range({kv}.rank(), {whole} // {kv}.size() * {kv}.size(), {kv}.size())"
        edits.replace(call, text)
        return
    _wrap(edits, call, f"(group[{kv}.rank()] for group in zip(*[iter(x)] * {kv}.size()))")


def _wrap(edits: Edits, call: cst.Call, text: str) -> None:
    """Put a call in the place of ``x`` in an expression."""

    class Put(cst.CSTTransformer):
        def leave_Name(self, _: cst.Name, updated: cst.Name) -> cst.BaseExpression:
            return inner if updated.value == "x" else updated

    inner: cst.BaseExpression = call

    def change(new: cst.BaseExpression) -> cst.BaseExpression:
        nonlocal inner
        inner = new
        made = edits.expression(text).visit(Put())
        assert isinstance(made, cst.BaseExpression)
        return made

    edits.change(call, change)


def _batches(script: Script, value: cst.BaseExpression) -> list[cst.Call]:
    """Return the calls within a loop's head that make batches."""
    if not isinstance(value, cst.Call):
        return []
    function = script.called(value)
    if function is not None:
        return [value] if script.nodes(function, cst.Yield) else []
    name = script.name(value)
    if attribute_call(value, *_PARTS) is not None or name.split(".")[-1] in _PARTS:
        return [value]
    if name in ("builtins.enumerate", "builtins.zip") or name.startswith("tqdm."):
        inner = [_batches(script, each.value) for each in value.args]
        if name == "builtins.zip" and all(inner):
            return [value]  # their batches belong together
        return [call for each in inner for call in each]
    return []


def _arrays_of(script: Script, loop: cst.For) -> list[str]:
    """Return what a loop takes rows of by its variable: "x", "y" of x[i : i + 32], y[index]."""
    varying = {each.value for each in script.nodes(loop.target, cst.Name)}
    found: dict[str, None] = {}
    for _ in range(3):  # index = order[i : i + 32], batch = x[index]
        for assign in script.nodes(loop.body, cst.Assign):
            if _names(script, assign.value) & varying:
                for target in assign.targets:
                    varying |= _names(script, target.target)
    for each in script.nodes(loop.body, cst.Subscript):
        is_row = bool(_names(script, each.slice[0].slice) & varying)
        if is_row and not _names(script, each.value) & varying:
            found[script.code(each.value)] = None
    return list(found)


def _names(script: Script, node: cst.CSTNode) -> set[str]:
    return {each.value for each in script.nodes(node, cst.Name)}

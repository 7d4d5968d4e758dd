"""Counts of steps that a script computes from its data: on several ranks an epoch has fewer."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.script import Script

__all__ = ["divide_counts", "says_steps_of"]

_DIVIDE = cst.FloorDivide | cst.Divide


def divide_counts(
    edits: Edits,
    data: Iterable[str],
    batch_sizes: Iterable[cst.BaseExpression],
) -> None:
    """Divide ``len(data) // batch_size`` by the number of ranks, wherever that is computed.

    ``data``: expressions of what is shared.
    """
    script, kv = edits.script, edits.kv
    names = "|".join(re.escape(each) for each in data)
    if not names:
        return
    length = re.compile(rf"len\(({names})\)|({names})\.(shape\[0\]|size\(0\))")
    sizes = {script.code(each) for each in batch_sizes}
    sizes |= {script.code(o) for each in batch_sizes for o in script.origins(each)}
    for each in script.nodes(script.module, cst.BinaryOperation):
        if not isinstance(each.operator, _DIVIDE) or each in edits.places:
            continue
        by = {script.code(each.right), *map(script.code, script.origins(each.right))}
        if not by & sizes or not _is_length(script, each.left, length):
            continue
        edits.change(each, lambda old: _divided(old, edits.expression(f"{kv}.size()")))
        edits.why(each, f"a rank takes 1/{kv}.size() as many steps in an epoch")


def _is_length(script: Script, value: cst.BaseExpression, length: re.Pattern[str]) -> bool:
    """Return whether it is a length, or some times that."""
    if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Multiply):
        return any(_is_length(script, each, length) for each in (value.left, value.right))
    return any(
        length.fullmatch(script.code(each)) is not None
        for each in [value, *(script.origins(value) if isinstance(value, cst.Name) else [])]
    )


def _divided(old: cst.BinaryOperation, size: cst.BaseExpression) -> cst.BinaryOperation:
    bare = old.with_changes(lpar=[], rpar=[])
    return cst.BinaryOperation(bare, old.operator, size, lpar=old.lpar, rpar=old.rpar)


def says_steps_of(script: Script, value: cst.BaseExpression, edits: Edits) -> bool:
    """Return whether a count is of what a rank has: of ``len(loader)``, or was divided."""
    todo, seen = [value], set()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        if any(node in edits.places for node in script.nodes(each, cst.BinaryOperation)):
            return True
        if any(
            script.name(call) == "builtins.len" and _is_loader(script, call.args[0].value)
            for call in script.nodes(each, cst.Call) if call.args
        ):  # fmt: skip
            return True
        for name in script.nodes(each, cst.Name):
            todo += [origin for origin in script.origins(name) if origin is not name]
    return False


def _is_loader(script: Script, value: cst.BaseExpression) -> bool:
    return any(
        script.name(origin) == "torch.utils.data.DataLoader" for origin in script.origins(value)
    )

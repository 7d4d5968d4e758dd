"""Arrays and tf.data: each rank trains on its own part, and all have equally many samples."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.schedules import divide_counts
from kolovod.migrate.script import Script, attribute_call

__all__ = ["is_array", "is_dataset", "roots", "share_arrays", "share_datasets"]

_SLICES = "tensorflow.data.Dataset.from_tensor_slices"
_DEPTH = 5


def roots(
    script: Script, value: cst.BaseExpression, depth: int = _DEPTH
) -> list[cst.BaseExpression]:
    """Return the expressions at the beginning of chains such as source.shuffle(100).batch(32)."""
    if depth == 0:
        return []
    found: dict[cst.BaseExpression, None] = {}
    for origin in script.origins(value):
        first = origin
        while (
            isinstance(first, cst.Call)
            and isinstance(first.func, cst.Attribute)
            and isinstance(first.func.value, cst.Call)
        ):
            first = first.func.value
        if (
            isinstance(first, cst.Call)
            and isinstance(first.func, cst.Attribute)
            and not script.name(first)
            and first.func.value is not value
        ):
            found |= dict.fromkeys(roots(script, first.func.value, depth - 1))
        else:
            found[first] = None
    return list(found)


def is_dataset(script: Script, root: cst.BaseExpression) -> bool:
    """Return whether an expression is a source of tf.data."""
    return isinstance(root, cst.Call) and script.name(root).startswith("tensorflow.data.")


def share_datasets(edits: Edits, value: cst.BaseExpression) -> bool:
    """Let the sources of a dataset yield this rank's part; return False if they are not seen."""
    script, kv = edits.script, edits.kv
    sources = [root for root in roots(script, value) if is_dataset(script, root)]
    for source in sources:
        assert isinstance(source, cst.Call)
        if source in edits.places:
            continue
        given = source.args[0].value if source.args else None
        arrays = (
            [each.value for each in given.elements] if isinstance(given, cst.Tuple) else [given]
        )
        if (
            script.name(source) == _SLICES
            and all(each is not None and is_array(each) for each in arrays)
            and script.statement_of(source) is not None
        ):
            share_arrays(
                edits, source, [each for each in arrays if each is not None], batches(script)
            )
            edits.change(source, lambda new: new)  # so that it is known as done
            continue
        text = f"x.shard({kv}.size(), {kv}.rank())"
        template = edits.expression(text)
        assert isinstance(template, cst.Call)

        def shard(new: cst.Call, template: cst.Call = template) -> cst.Call:
            assert isinstance(template.func, cst.Attribute)
            return template.with_changes(func=template.func.with_changes(value=new))

        edits.change(source, shard)
        edits.why(source, "each rank reads its own part")
        edits.need(
            source,
            "all ranks must take equally many steps in an epoch: say how many "
            "(steps_per_epoch, take), or see docs/uneven-data.md",
        )
    return bool(sources)


def is_array(value: cst.BaseExpression) -> bool:
    """Return whether it may be an array that is at hand: x, self.x, x[:100] or data["x"]."""
    if isinstance(value, cst.Subscript):
        return is_array(value.value)
    return isinstance(value, cst.Name | cst.Attribute)


def batches(script: Script) -> list[cst.BaseExpression]:
    """Return the sizes of the batches that datasets make."""
    return [
        call.args[0].value for call in script.calls
        if attribute_call(call, "batch", "padded_batch") is not None and call.args
    ]  # fmt: skip


def share_arrays(
    edits: Edits,
    near: cst.CSTNode,
    arrays: list[cst.BaseExpression],
    batch_sizes: list[cst.BaseExpression],
) -> None:
    """Take every size-th row, and equally many on all ranks; ``near``: where they are used.

    Steps that the script counts, for batches of these sizes, become fewer.
    """
    script, kv = edits.script, edits.kv
    statement = script.statement_of(near)
    assert statement is not None
    divide_counts(edits, [script.code(each) for each in arrays], batch_sizes)
    name = script.unused("share", "rank_share")
    rows = f"len({script.code(arrays[0])}) // {kv}.size() * {kv}.size()"
    edits.before(statement, f"{name} = slice({kv}.rank(), {rows}, {kv}.size())")
    for each in arrays:
        edits.replace(each, f"{script.code(each)}[{name}]")
    edits.why(
        near,
        "each rank trains on its own rows, all on equally many; its batches have the "
        f"same size as before, so all ranks' together are {kv}.size() times as large",
    )

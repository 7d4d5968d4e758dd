"""Training loops of JAX and optax on one process: what makes them distributed."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.common import (
    look_at_counts,
    only_on_rank_0,
    place_import_and_init,
    prints_in,
    scale_rate,
    statement_line,
)
from kolovod.migrate.edits import Edits, wrapped
from kolovod.migrate.loops import callers_of, chains, functions_of
from kolovod.migrate.random_numbers import equal_data
from kolovod.migrate.rows import share_batches
from kolovod.migrate.script import Script, argument, attribute_call, keyword
from kolovod.migrate.tf_data import share_datasets
from kolovod.migrate.torch_data import LOADER, share_loaders

__all__ = ["distribute"]

_SEVERAL_DEVICES = (
    "jax.pmap",
    "jax.distributed.initialize",
    "jax.shard_map",
    "jax.experimental.shard_map.shard_map",
)
_NNX = ("flax.nnx.Optimizer", "flax.nnx.ModelAndOptimizer")
_FILES = (
    "numpy.save",
    "numpy.savez",
    "numpy.savez_compressed",
    "jax.numpy.save",
    "jax.numpy.savez",
)


def distribute(edits: Edits) -> None:
    """Plan the changes, or say what keeps the script from being changed."""
    script = edits.script
    if several := script.calls_of(*_SEVERAL_DEVICES):
        edits.need(
            several[0],
            "the script is for several devices of a process already; Kolovod "
            "has one device for each. Nothing is changed",
        )
        return
    receivers = _receivers(script)
    optimizers: dict[cst.Call, None] = {}
    for receiver in receivers:
        for origin in script.origins(receiver):
            if isinstance(origin, cst.Call) and script.name(origin).startswith("optax."):
                optimizers[origin] = None
    if not optimizers:
        edits.need(
            None,
            "no optimizer of optax is in this script that its init() or update() could be seen of: "
            "import kolovod.jax as kv, call kv.init(), start from "
            "kv.broadcast_pytree(params), step by kv.allreduce_pytree(grads), and give each rank "
            "its own part of the data (docs/jax.md)",
        )
        return
    edits.kv = script.unused("kv", "kolovod_jax")
    for call in optimizers:
        inner = call.args[0].value if script.name(call) == "optax.MultiSteps" else call
        wrapped(edits, inner, f"{edits.kv}.DistributedOptimizer")
        edits.why(call, "gradients are averaged over all ranks, inside jax.jit too")
        scale_rate(
            edits, argument(call, "learning_rate", 0), call, is_sgd=script.name(call) == "optax.sgd"
        )
    steps = [
        call for call in script.calls
        if not script.name(call)
        and attribute_call(call, "update" if len(call.args) >= 2 else "", "apply_gradients")
    ]  # fmt: skip
    kept = _start_equal(edits)
    imports = _share_data(edits, steps)
    if _end_together(edits, steps, kept):
        imports += [] if script.module_name("jax") else ["import jax"]
        files = [line for call in script.calls_of(*_FILES)
                 if (line := statement_line(script, call)) is not None]  # fmt: skip
        only_on_rank_0(edits, prints_in(script, functions_of(script, steps)), files)
    for call in script.calls_of("pickle.dump"):
        edits.look(call, f"let only {edits.kv}.rank() == 0 open and write this file")
    look_at_counts(edits)
    ways = [way for step in steps for way in chains(script, step)]
    place_import_and_init(
        edits, ["jax", "optax"], "kolovod.jax", *imports, then=equal_data(edits, ways)
    )


def _receivers(script: Script) -> list[cst.BaseExpression]:
    """Return what may be an optimizer: X of X.init(params), X.update(...), create(tx=X)."""
    found = []
    for call in script.calls:
        if (receiver := attribute_call(call, "init", "update")) is not None:
            found.append(receiver)
        if (tx := keyword(call, "tx")) is not None:
            found.append(tx.value)
        elif script.name(call) in _NNX and (given := argument(call, "tx", 1)) is not None:
            found.append(given.value)
    return found


def _start_equal(edits: Edits) -> list[tuple[cst.FunctionDef | None, str]]:
    """Broadcast parameters before the optimizer sees them; return where which name has them."""
    script, kv = edits.script, edits.kv
    kept: list[tuple[cst.FunctionDef | None, str]] = []
    for call in script.calls:
        given, target = None, ""
        if (receiver := attribute_call(call, "init")) is not None and call.args:
            if any(script.name(each).startswith("optax.") for each in script.origins(receiver)):
                given = call.args[0].value
        elif keyword(call, "tx") is not None and (params := keyword(call, "params")) is not None:
            given = params.value
            assigned = script.target_of(call)
            target = script.code(assigned) if assigned is not None else ""
        statement, function = script.statement_of(call), script.function_of(call)
        if script.name(call) in _NNX and call.args and statement is not None:
            model, nnx = script.code(call.args[0].value), script.module_name("flax.nnx")
            if nnx:
                state = f"{nnx}.state({model})"
                edits.before(statement, f"{nnx}.update({model}, {kv}.broadcast_pytree({state}))")
                edits.why(call, "all ranks start with rank 0's parameters")
                kept.append((function, state))
                continue
        if given is None:
            continue
        if statement is not None and script.name(given) == "equinox.filter":
            assert isinstance(given, cst.Call)
            model, code = script.code(given.args[0].value), script.code(given)
            module = script.module_name("equinox") or "equinox"
            edits.before(
                statement, f"{model} = {module}.combine({kv}.broadcast_pytree({code}), {model})"
            )
            edits.why(call, "all ranks start with rank 0's parameters")
            kept.append((function, model))
            continue
        if statement is not None and isinstance(given, cst.Name) and _is_own(script, given):
            edits.before(statement, f"{given.value} = {kv}.broadcast_pytree({given.value})")
            kept.append((function, target or given.value))
        elif keyword(call, "tx") is not None:
            wrapped(edits, given, f"{kv}.broadcast_pytree")
            kept.append((function, target))
        else:
            edits.need(
                call,
                "all ranks must start with the same parameters: params = "
                f"{kv}.broadcast_pytree(params) before this",
            )
            continue
        edits.why(call, "all ranks start with rank 0's parameters")
    if not kept and not edits.needs:
        edits.need(
            None,
            "all ranks must start with the same parameters: params = "
            f"{kv}.broadcast_pytree(params)",
        )
    return kept


def _is_own(script: Script, name: cst.Name) -> bool:
    """Return whether the function that has the name may give it another value."""
    function = script.function_of(name)
    if function is None or script.assignments(name.value, function):
        return True
    return name.value in {each.name.value for each in function.params.params}


def _share_data(edits: Edits, steps: list[cst.Call]) -> list[str]:
    script, kv = edits.script, edits.kv
    ways = [way for step in steps for way in chains(script, step)]
    if script.calls_of(LOADER):
        return share_loaders(edits, ways)
    for way in ways:
        loops = [place.loop for place in way if isinstance(place.loop, cst.For)]
        shared = [share_datasets(edits, loop.iter) for loop in loops]
        if loops and not any(shared):
            share_batches(edits, way)
        if loops:
            edits.look(
                loops[0],
                "losses of this loop are of this rank's part of the data: "
                f"{kv}.allreduce(loss), on all ranks, is the average",
            )
    return []


def _end_together(
    edits: Edits, steps: list[cst.Call], kept: list[tuple[cst.FunctionDef | None, str]]
) -> bool:
    """Have every rank wait for the last step, which JAX runs in the background; or return False."""
    script = edits.script
    jax = script.module_name("jax") or "jax"
    for way in [way for step in steps for way in chains(script, step) if way]:
        loop = way[-1].loop
        for function, name in kept:
            assigned = {code for each in script.nodes(loop, cst.Assign) for target in each.targets
                        for code in _names(script, target.target)}  # fmt: skip
            is_kept = name in assigned or not name.isidentifier()  # nnx.state(model)
            if is_kept and script.function_of(loop) is function:
                edits.after(loop, f"{jax}.block_until_ready({name})")
                edits.why(
                    loop,
                    "a rank that ended before its last step is done would be missed "
                    "by the others in it",
                )
                return True
        trains = callers_of(script, steps)
        for each in script.nodes(loop, cst.Assign):
            called = script.called(each.value) if isinstance(each.value, cst.Call) else None
            names = _names(script, each.targets[0].target)
            if called is not None and called in trains and names[0].isidentifier():
                edits.after(loop, f"{jax}.block_until_ready({names[0]})")
                edits.why(
                    loop,
                    "a rank that ended before its last step is done would be missed "
                    "by the others in it",
                )
                return True
    edits.need(
        None,
        "read a result of the last step on every rank, by jax.block_until_ready "
        "say: a rank that ends before that step is done is missed by the others",
    )
    return False


def _names(script: Script, target: cst.BaseExpression) -> list[str]:
    if isinstance(target, cst.Tuple | cst.List):
        return [script.code(each.value) for each in target.elements]
    return [script.code(target)]

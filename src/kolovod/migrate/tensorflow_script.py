"""Training loops with tf.GradientTape on one process: what makes them distributed."""

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
from kolovod.migrate.keras_script import is_optimizer, saves_of
from kolovod.migrate.loops import chains, functions_of
from kolovod.migrate.random_numbers import equal_data
from kolovod.migrate.rows import share_batches
from kolovod.migrate.script import Assignment, Script, argument, attribute_call, keyword
from kolovod.migrate.tf_data import share_datasets

__all__ = ["TAPE", "distribute"]

TAPE = "tensorflow.GradientTape"
_VARIABLES = ("trainable_variables", "trainable_weights", "variables", "weights")
_BUILT = (
    "keras.Input", "keras.layers.Input", "keras.layers.InputLayer", "keras.applications.",
    "keras.models.load_model", "keras.saving.load_model",
)  # fmt: skip


def distribute(edits: Edits) -> None:
    """Plan the changes, or say what keeps the script from being changed."""
    script = edits.script
    edits.kv = script.unused("kv", "kolovod_tensorflow")
    steps = [
        step for item in script.nodes(script.module, cst.WithItem)
        if script.name(item.item) == TAPE and (step := _distribute_tape(edits, item)) is not None
    ]  # fmt: skip
    if not edits:
        if not edits.needs:
            edits.need(None, "no `with tf.GradientTape() as tape` is in this script")
        return
    models: set[str] = set()
    for step in steps:
        if (sources := argument(step, "sources", 1)) is not None:
            models |= _start_equal(edits, sources.value, step)
    _share_data(edits, steps)
    _equal_after_reading(edits)
    for call in script.calls:
        if (optimizer := attribute_call(call, "apply_gradients")) is not None:
            for each in script.origins(optimizer):
                if is_optimizer(script, each):
                    assert isinstance(each, cst.Call)
                    is_sgd = script.name(each).endswith(".SGD")
                    rate = argument(each, "learning_rate", 0)
                    if rate is None or rate.value not in edits.places:
                        scale_rate(edits, rate, each, is_sgd=is_sgd)
    saves = [*saves_of(edits, models), *_checkpoints(edits)]
    only_on_rank_0(edits, prints_in(script, functions_of(script, steps)), saves)
    look_at_counts(edits)
    ways = [way for step in steps for way in chains(script, step)]
    place_import_and_init(edits, ["tensorflow"], "kolovod.tensorflow", then=equal_data(edits, ways))


def _equal_after_reading(edits: Edits) -> None:
    """Ask the user to make ranks equal after a checkpoint is read, which others may not have."""
    for call in edits.script.calls:
        if attribute_call(call, "restore", "load_weights") is not None:
            edits.need(
                call,
                "after this ranks must be equal again, since not every rank may find the file: "
                f"{edits.kv}.broadcast_variables([*model.variables, *optimizer.variables], "
                "root_rank=0)",
            )


def _distribute_tape(edits: Edits, item: cst.WithItem) -> cst.Call | None:
    """Let a tape average gradients; return the call that computes them."""
    script, kv = edits.script, edits.kv
    call = item.item
    assert isinstance(call, cst.Call)
    name = script.code(item.asname.name) if item.asname is not None else ""
    function = script.function_of(item)
    asked = [
        each for each in script.nodes(function or script.module, cst.Call)
        if (tape := attribute_call(each, "gradient", "jacobian")) is not None
        and script.code(tape) == name
    ]  # fmt: skip
    if len(asked) != 1 or keyword(call, "persistent") or attribute_call(asked[0], "jacobian"):
        edits.need(
            call,
            "this tape is asked for several gradients, or for none: make that a "
            f"{kv}.DistributedGradientTape whose gradients an optimizer applies",
        )
        return None
    wrapped(edits, call, f"{kv}.DistributedGradientTape")
    edits.why(call, "tape.gradient returns the averages over all ranks")
    return asked[0]


def _start_equal(edits: Edits, sources: cst.BaseExpression, step: cst.Call) -> set[str]:
    """Broadcast what is trained; return the names of models."""
    script, kv = edits.script, edits.kv
    if isinstance(sources, cst.Name):  # variables = model.trainable_variables
        for _, value, index in script.assignments(sources.value, script.function_of(sources)):
            if index < 0 and _model_of(value) is not None:
                sources = value
    if (model := _model_of(sources)) is not None:
        return _start_models_equal(edits, model, step)
    elements = sources.elements if isinstance(sources, cst.List | cst.Tuple) else [sources]
    values = [each.value if isinstance(each, cst.BaseElement) else each for each in elements]
    places = [place for value in values for place in _definitions(script, value)]
    statements = [script.statement_of(assign) for assign, _, _ in places]
    if (
        len(places) == len(values)
        and len({script.parent(each) for each in statements if each is not None}) == 1
        and all(script.name(value) == "tensorflow.Variable" for _, _, value in places)
    ):
        last = max((each for each in statements if each is not None), key=script.line)
        names = ", ".join(script.code(target) for _, target, _ in places)
        edits.after(last, f"{kv}.broadcast_variables([{names}], root_rank=0)")
        edits.why(last, "all ranks start with rank 0's weights")
    else:
        edits.need(
            sources,
            "all ranks must start with the same weights: call "
            f"{kv}.broadcast_variables(variables, root_rank=0) before the first step",
        )
    return set()


def _model_of(value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return the model, if the value is model.trainable_variables; None: it is not."""
    if isinstance(value, cst.Attribute) and value.attr.value in _VARIABLES:
        return value.value
    return None


def _start_models_equal(edits: Edits, model: cst.BaseExpression, step: cst.Call) -> set[str]:
    """Broadcast a model's weights where it has its first ones; return its names."""
    script, kv = edits.script, edits.kv
    places = _definitions(script, model)
    names = {script.code(target) for _, target, _ in places} | {script.code(model)}
    if len(places) == 1:
        assign, target, value = places[0]
        name = script.code(target)
        after, builds = _first_weights(script, assign, name)
        if builds or _is_built(script, value):
            edits.after(after, f"{kv}.broadcast_variables({name}.variables, root_rank=0)")
            edits.why(after, "all ranks start with rank 0's weights")
            return names
    if _equal_after_first_step(edits, model, step):
        return names
    edits.need(
        model,
        "all ranks must start with the same weights: call "
        f"{kv}.broadcast_variables({script.code(model)}.variables, root_rank=0) once they exist, "
        "before the first step or after it",
    )
    return names


def _equal_after_first_step(edits: Edits, model: cst.BaseExpression, step: cst.Call) -> bool:
    """Broadcast a model that has no weights before it sees data, or return False."""
    script, kv = edits.script, edits.kv
    around = script.function_of(step) or script.module
    optimizers = [
        script.code(each) for call in script.nodes(around, cst.Call)
        if (each := attribute_call(call, "apply_gradients")) is not None
    ]  # fmt: skip
    ways = chains(script, step)
    loops = {way[0].loop: None for way in ways if way}
    if len({*optimizers}) != 1 or len(loops) != 1 or not all(ways):
        return False
    loop, optimizer = next(iter(loops)), optimizers[0]
    function, inner = script.function_of(loop), script.function_of(step)
    if function is not None and any("function" in script.code(d) for d in function.decorators):
        return False
    names = [script.code(model), optimizer]
    for name in names:
        root = name.split(".")[0]
        params = {each.name.value for each in inner.params.params} if inner is not None else set()
        if inner is not function and (
            script.class_of(loop) is not script.class_of(step) if root == "self"
            else root in params or script.assignments(root, inner) or not name.isidentifier()
        ):  # fmt: skip
            return False
    last = loop.body.body[-1]
    if not isinstance(last, cst.BaseStatement):
        return False
    indent = script.module.default_indent
    edits.after(
        last,
        f"if {optimizer}.iterations == 1:\n{indent}{kv}.broadcast_variables("
        f"[*{names[0]}.variables, *{optimizer}.variables], root_rank=0)\n",
    )
    edits.why(loop, "after the first step, when they exist, all ranks take rank 0's weights")
    return True


def _definitions(
    script: Script, value: cst.BaseExpression, depth: int = 5
) -> list[tuple[Assignment, cst.BaseExpression, cst.BaseExpression]]:
    """Return where an object is made: the assignment, its name there, and the expression."""
    if not isinstance(value, cst.Name | cst.Attribute) or depth == 0:
        return []
    function = script.function_of(value)
    while function is not None and isinstance(value, cst.Name):
        names = [each.name.value for each in function.params.params]
        if value.value in names:
            found = []
            for call in script.call_sites(function):
                given = script.given(call, function, value.value)
                found += _definitions(script, given, depth - 1) if given is not None else []
            return list(dict.fromkeys(found))
        if script.assignments(value.value, function):
            break
        function = script.function_of(function)
    return [
        (assign, target, made)
        for assign, made, index in script.assignments(script.code(value), function)
        if index < 0
        and (target := script.target_of(made)) is not None
        and script.statement_of(assign) is not None
    ]


def _is_built(script: Script, value: cst.BaseExpression) -> bool:
    """Return whether a model has its weights as soon as it is made."""
    for origin in script.origins(value):
        for call in [origin, *script.nodes(origin, cst.Call)]:
            if not isinstance(call, cst.Call):
                continue
            name = script.name(call)
            if name in _BUILT or name.startswith("keras.applications."):
                return True
            if keyword(call, "input_shape") or keyword(call, "input_dim"):
                return True
            if name == "keras.Model" and (keyword(call, "inputs") or len(call.args) >= 2):
                return True
    return False


def _first_weights(
    script: Script, assign: Assignment, model: str
) -> tuple[cst.BaseStatement, bool]:
    """Return after which statement the model has its first weights, and whether that builds it."""
    statement = script.statement_of(assign)
    assert statement is not None
    found, seen, builds = statement, False, False
    for each in script.block_of(statement):
        if seen and isinstance(each, cst.SimpleStatementLine | cst.If):
            for call in script.nodes(each, cst.Call):
                loaded = attribute_call(call, "load_weights", "build")
                if loaded is not None and script.code(loaded) == model:
                    found = each
                    builds = builds or attribute_call(call, "build") is not None
        seen = seen or each is statement
    return found, builds


def _share_data(edits: Edits, steps: list[cst.Call]) -> None:
    script = edits.script
    for step in steps:
        for way in chains(script, step):
            done = False
            for place in way:
                if isinstance(place.loop, cst.For):
                    values = script.iterated(place.loop.iter) or [place.loop.iter]
                    shared = [share_datasets(edits, value) for value in values]
                    done = any(shared)
                if done:
                    break
            if not done and script.calls_of("tensorflow.data."):
                edits.need(
                    way[0].loop if way else step,
                    "give each rank its own part of this "
                    f"data: dataset.shard({edits.kv}.size(), {edits.kv}.rank()), and all "
                    "equally many steps",
                )
            elif not done:
                share_batches(edits, way)
            elif way:
                edits.look(
                    way[0].loop,
                    "losses and accuracies of this loop are of this rank's "
                    f"part of the data: {edits.kv}.allreduce(loss), on all ranks, is the "
                    "average",
                )


def _checkpoints(edits: Edits) -> list[cst.SimpleStatementLine]:
    script, found = edits.script, []
    for call in script.calls:
        saver = attribute_call(call, "save", "write")
        if saver is None:
            continue
        names = [script.name(origin) for origin in script.origins(saver)]
        if any(name.startswith("tensorflow.train.Checkpoint") for name in names):
            if (line := statement_line(script, call)) is not None:
                found.append(line)
            else:
                edits.look(call, f"let only {edits.kv}.rank() == 0 write this file")
    return found

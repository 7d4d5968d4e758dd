"""Keras' compile and fit on one process: what makes them distributed."""

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
from kolovod.migrate.edits import Edits, with_argument, wrapped
from kolovod.migrate.loops import functions_of
from kolovod.migrate.random_numbers import equal_data
from kolovod.migrate.schedules import says_steps_of
from kolovod.migrate.script import Script, argument, attribute_call, keyword
from kolovod.migrate.tf_data import is_array, share_arrays, share_datasets

__all__ = ["ROOTS", "distribute", "fits", "is_optimizer", "saves_of"]

ROOTS = ("keras", "tensorflow", "tf_keras")
_IMPORTS = {
    "keras": "import keras",
    "tensorflow": "from tensorflow import keras",
    "tf_keras": "import tf_keras as keras",
}
"""By package of which the script imports parts only: what makes all of Keras known as keras."""
_READERS = ("keras.models.load_model", "keras.saving.load_model")
_WRITERS = {f"keras.callbacks.{name}" for name in ("CSVLogger", "ModelCheckpoint", "TensorBoard")}


def fits(script: Script) -> list[cst.Call]:
    """Return calls of model.fit, other than of scikit-learn."""
    found = []
    for call in script.calls:
        model = attribute_call(call, "fit")
        if model is None or script.name(call):
            continue
        origins = [script.name(each) for each in script.origins(model)]
        if not any(each.startswith("sklearn.") for each in origins):
            found.append(call)
    return found


def is_optimizer(script: Script, value: cst.BaseExpression) -> bool:
    """Return whether the expression makes one of Keras' optimizers."""
    name = script.name(value) if isinstance(value, cst.Call) else ""
    return name.startswith("keras.optimizers.") and name.split(".")[-1][:1].isupper() and (
        ".schedules." not in name
    )  # fmt: skip


def distribute(edits: Edits) -> None:
    """Plan the changes, or say what keeps the script from being changed."""
    script = edits.script
    training = fits(script)
    compiling = [
        call for call in script.calls
        if attribute_call(call, "compile") is not None and not script.name(call)
    ]  # fmt: skip
    if not training or not compiling:
        edits.need(
            None,
            "no model.compile and model.fit are in this script: what trains must be "
            "changed where it is",
        )
        return
    edits.kv = script.unused("kv", "kolovod_keras")
    imports: list[str] = []
    if not script.module_name("keras"):
        imports = [next(_IMPORTS[name.split(".")[0]] for _, name in script.imports(*ROOTS))]
    if not all(_distribute_optimizer(edits, call) for call in compiling):
        return
    for call in training:
        _distribute_fit(edits, call)
    models = {
        script.code(model) for call in (*training, *compiling)
        if (model := attribute_call(call, "fit", "compile")) is not None
    }  # fmt: skip
    only_on_rank_0(
        edits, prints_in(script, functions_of(script, training)), saves_of(edits, models)
    )
    _callbacks_that_write(edits)
    _load_with_optimizers(edits)
    for call in script.calls:
        if attribute_call(call, "load_weights") is not None:
            wait_for_file(edits, call)
    look_at_counts(edits)
    place_import_and_init(edits, ROOTS, "kolovod.keras", *imports, then=equal_data(edits, []))


def _load_with_optimizers(edits: Edits) -> None:
    """Have models read by Kolovod's ``load_model``: else their optimizers average nothing."""
    script, kv = edits.script, edits.kv
    for call in script.calls_of(*_READERS):
        if len(call.args) == 1 and call.args[0].keyword is None and not call.args[0].star:
            edits.replace(call.func, f"{kv}.load_model")
            edits.why(call, "the optimizer of a model that is read averages gradients, too")
            wait_for_file(edits, call)
        else:
            edits.need(
                call,
                "a model that is read has an optimizer that averages nothing: read it by "
                f"{kv}.load_model(path)",
            )


def wait_for_file(edits: Edits, call: cst.Call) -> None:
    """Let all ranks wait for rank 0 before they read what it has written in this run."""
    script, kv = edits.script, edits.kv
    after = [each for each in fits(script) if script.line(each) < script.line(call)]
    statement = script.statement_of(call)
    if statement is None or not any(
        script.function_of(each) is script.function_of(call) for each in after
    ):
        return
    for each in script.ancestors(call):
        if isinstance(each, cst.If | cst.Try):
            statement = each
        elif isinstance(each, cst.FunctionDef):
            break
    edits.before(statement, f"{kv}.barrier()")
    edits.why(call, "no rank reads before rank 0 has written; hosts must share the file")


def _distribute_optimizer(edits: Edits, call: cst.Call) -> bool:
    """Let compile's optimizer average gradients; return False if it is not seen."""
    script, kv = edits.script, edits.kv
    given = argument(call, "optimizer", 0)
    keras = script.module_name("keras") or "keras"
    if given is not None and isinstance(given.value, cst.SimpleString):
        code = script.code(given.value)
        edits.replace(given.value, f"{kv}.DistributedOptimizer({keras}.optimizers.get({code}))")
        scale_rate(edits, None, call, is_sgd=False)
    else:
        origins = script.origins(given.value) if given is not None else []
        made = [each for each in origins if is_optimizer(script, each)]
        if given is None or not made or len(made) < len(origins):
            edits.give_up(
                f"which optimizer the compile in line {script.line(call)} gets cannot be seen: "
                f"make it {kv}.DistributedOptimizer(optimizer)"
            )
            return False
        wrapped(edits, given.value, f"{kv}.DistributedOptimizer")
        for each in made:
            assert isinstance(each, cst.Call)
            is_sgd = script.name(each).endswith(".SGD")
            scale_rate(edits, argument(each, "learning_rate", 0), each, is_sgd=is_sgd)
    edits.why(call, "gradients are averaged over all ranks before they are applied")
    return True


def _distribute_fit(edits: Edits, call: cst.Call) -> None:
    script, kv = edits.script, edits.kv
    _share_data(edits, call)
    _add_callbacks(edits, call)
    steps = keyword(call, "steps_per_epoch")
    if (
        steps is not None
        and script.code(steps.value) != "None"
        and not says_steps_of(script, steps.value, edits)
    ):
        wrap = "{}" if isinstance(steps.value, cst.Name | cst.Integer | cst.Call) else "({})"
        edits.replace(steps.value, f"{wrap.format(script.code(steps.value))} // {kv}.size()")
        edits.why(steps, "an epoch has fewer steps of larger batches")
    verbose = keyword(call, "verbose")
    if verbose is None:
        value = edits.expression(f'"auto" if {kv}.rank() == 0 else 0')
        edits.change(call, lambda new: with_argument(new, "verbose", value))
    elif script.code(verbose.value) != "0":
        edits.replace(verbose.value, f"{script.code(verbose.value)} if {kv}.rank() == 0 else 0")
    edits.why(call, "one rank shows the progress")


def _share_data(edits: Edits, call: cst.Call) -> None:
    script, kv = edits.script, edits.kv
    x, y = argument(call, "x", 0), argument(call, "y", 1)
    if x is not None and y is None and share_datasets(edits, x.value):
        return
    given = [each.value for each in (x, y, keyword(call, "sample_weight")) if each is not None]
    several = any(
        isinstance(origin, cst.List | cst.Dict | cst.Tuple)
        for each in given
        for origin in script.origins(each)
    )
    if (
        y is None
        or several
        or script.statement_of(call) is None
        or not all(is_array(each) for each in given)
    ):
        edits.need(
            call,
            "give each rank its own part of this data, and all equally many steps: "
            f"every {kv}.size()-th sample from {kv}.rank() on, say",
        )
        return
    size = argument(call, "batch_size", 2)
    share_arrays(edits, call, given, [size.value] if size is not None else [])


def _add_callbacks(edits: Edits, call: cst.Call) -> None:
    """Start equal, and average metrics: before callbacks that look at them."""
    script, kv = edits.script, edits.kv
    indent, statement = script.module.default_indent, script.statement_of(call)
    starting = f"{kv}.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)"
    metrics = f"{kv}.callbacks.MetricAverageCallback()"
    if statement is None:
        elements = f"{starting}, {metrics}"
    else:
        name = script.unused(f"{kv}_callbacks")
        edits.before(statement, f"{name} = [\n{indent}{starting},\n{indent}{metrics},\n]")
        elements = f"*{name}"
    new = edits.expression(f"[{elements}]")
    assert isinstance(new, cst.List)
    given = keyword(call, "callbacks")
    if given is None or script.code(given.value) == "None":
        value = new if statement is None else edits.expression(elements[1:])
        if given is None:
            edits.change(call, lambda old: with_argument(old, "callbacks", value))
        else:
            edits.change(given.value, lambda _: value)
    elif isinstance(given.value, cst.List):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        if given.value.elements and isinstance(given.value.elements[0].comma, cst.Comma):
            comma = given.value.elements[0].comma
        ours = [each.with_changes(comma=comma) for each in new.elements]
        edits.change(given.value, lambda old: old.with_changes(elements=[*ours, *old.elements]))
    else:
        edits.replace(given.value, f"[{elements}, *{script.code(given.value)}]")
    edits.why(call, "all ranks start with rank 0's weights, and metrics are those of all ranks")


def _callbacks_that_write(edits: Edits) -> None:
    """Let rank 0 alone have those that write files."""
    script, kv = edits.script, edits.kv
    condition = edits.expression(f"x if {kv}.rank() == 0 else []")
    assert isinstance(condition, cst.IfExp)

    def only_there(old: cst.Element) -> cst.StarredElement:
        chosen = condition.with_changes(
            body=cst.List([cst.Element(old.value)]),
            lpar=[cst.LeftParen()],
            rpar=[cst.RightParen()],
        )
        return cst.StarredElement(chosen, comma=old.comma)

    listed: set[cst.BaseExpression] = set()
    for each in script.nodes(script.module, cst.List):
        for element in each.elements:
            writers = [
                origin for origin in script.origins(element.value)
                if isinstance(element, cst.Element) and script.name(origin) in _WRITERS
            ]  # fmt: skip
            if writers:
                listed |= set(writers)
                edits.change(element, only_there)
                edits.why(element, "one rank writes files")
    for call in script.calls:
        name = script.name(call)
        if name in _WRITERS and call not in listed:
            edits.look(call, f"it writes files: add it on {kv}.rank() == 0 only")
        elif name == "keras.callbacks.BackupAndRestore":
            given = argument(call, "backup_dir", 0)
            if given is not None and isinstance(given.value, cst.SimpleString):
                folder = script.code(given.value)
                edits.replace(given.value, f'{folder} + f"-of-rank-{{{kv}.rank()}}"')
                edits.why(call, "each rank goes on with the epoch that it has reached itself")
            else:
                edits.need(call, f"give each rank a folder of its own: one named by {kv}.rank()")
            edits.look(call, "docs/elastic.md says how jobs go on when some of their ranks end")
        elif name == "keras.callbacks.TerminateOnNaN":
            edits.replace(call.func, f"{kv}.callbacks.TerminateOnNaN")
            edits.why(call, "it ends all ranks; Keras's own ends the one whose loss it is")
        elif name == "keras.callbacks.LearningRateScheduler":
            edits.look(
                call,
                "it sets learning rates itself: multiply what its function returns by "
                f"{kv}.size(), if that is for SGD",
            )


def saves_of(edits: Edits, models: set[str]) -> list[cst.SimpleStatementLine]:
    """Return lines that save one of these models."""
    script, found = edits.script, []
    for call in script.calls:
        model = attribute_call(call, "save", "save_weights", "export")
        if model is None or script.code(model) not in models:
            continue
        line = statement_line(script, call)
        if line is None:
            edits.look(call, f"let only {edits.kv}.rank() == 0 write this file")
        else:
            found.append(line)
    return found

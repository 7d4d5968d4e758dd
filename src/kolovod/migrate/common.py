"""Changes that scripts of all frameworks need: the import, ``init()``, and work of rank 0 only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.schedules import says_steps_of
from kolovod.migrate.script import Script, argument, attribute_call, keyword

__all__ = [
    "only_on_rank_0",
    "place_import_and_init",
    "look_at_counts",
    "prints_in",
    "scale_rate",
    "statement_line",
]

_HARMLESS_FUNCTIONS = {
    f"builtins.{name}"
    for name in ("abs", "float", "format", "int", "len", "list", "max", "min", "range", "repr",
                 "round", "sorted", "str", "sum", "tuple", "type")
} | {"time.time", "time.perf_counter", "time.monotonic"}  # fmt: skip
_HARMLESS_METHODS = {
    "cpu", "detach", "dim", "format", "get", "get_last_lr", "item", "items", "join", "keys",
    "ljust", "lower", "mean", "numel", "numpy", "parameters", "result", "rjust", "size", "sum",
    "tolist", "upper", "values",
}  # fmt: skip
"""What a print may call and still be left out on a rank: it changes nothing that ranks share."""


_SCHEDULES = {
    **{f"keras.optimizers.schedules.{name}": ("initial_learning_rate", 0)
       for name in ("CosineDecay", "CosineDecayRestarts", "ExponentialDecay", "InverseTimeDecay",
                    "PolynomialDecay")},
    **{f"optax.{name}": ("init_value", 0)
       for name in ("cosine_decay_schedule", "exponential_decay", "linear_schedule",
                    "polynomial_schedule")},
    **{f"optax.{name}": ("peak_value", 1)
       for name in ("cosine_onecycle_schedule", "linear_onecycle_schedule",
                    "warmup_cosine_decay_schedule", "warmup_exponential_decay_schedule")},
    "optax.constant_schedule": ("value", 0),
}  # fmt: skip
"""By schedule of learning rates: the argument that is its highest rate, and the place of that."""


def place_import_and_init(
    edits: Edits,
    frameworks: Sequence[str],
    module: str,
    *more: str,
    then: Sequence[tuple[str, str]] = (),
) -> None:
    """Import ``module``, and form the world before anything asks for a rank.

    ``more``: further imports; ``then``: statements after ``init()``, each with its reason. Nothing
    is changed if the framework is not imported at the top. To be called last: it looks at what else
    changes.
    """
    script = edits.script
    imported = _last_import(script, frameworks)
    if imported is None:
        edits.give_up(
            f"the framework is not imported at the top of the script: import {module} as "
            f"{edits.kv} there, and call {edits.kv}.init() before anything else of it"
        )
        return
    places = edits.places
    for text in (f"import {module} as {edits.kv}", *more):
        edits.after(imported, text)
    edits.why(imported, f"{module} has what the script needs below, as {edits.kv}")
    guard = _main_block(script)
    if guard is None or _runs_on_import(script, guard, places):
        edits.after(imported, f"{edits.kv}.init()", apart=True)
        for text, _ in then:
            edits.after(imported, text)
        place: cst.CSTNode = imported
    else:
        first = guard.body.body[0]
        assert isinstance(first, cst.BaseStatement)
        edits.before(first, f"{edits.kv}.init()")
        for text, _ in then:
            edits.before(first, text)
        place = first
    edits.why(place, f"{edits.kv}.init() meets the other ranks; a single process is a world of one")
    for _, reason in then:
        edits.why(place, reason)


def _last_import(script: Script, frameworks: Sequence[str]) -> cst.BaseStatement | None:
    """Return the last of the imports at the top, at least the framework's."""
    body = script.module.body
    first = {script.top_of(node) for node, _ in script.imports(*frameworks)}
    indices = [index for index, each in enumerate(body) if each in first and _imports_only(each)]
    if not indices:
        return None
    index = indices[0]
    while index + 1 < len(body) and _imports_only(body[index + 1]):
        index += 1
    return body[index]


def _imports_only(statement: cst.CSTNode) -> bool:
    if isinstance(statement, cst.SimpleStatementLine):
        return all(isinstance(each, cst.Import | cst.ImportFrom) for each in statement.body)
    return isinstance(statement, cst.Try) and all(map(_imports_only, statement.body.body))


def _main_block(script: Script) -> cst.If | None:
    for each in script.module.body:
        if (
            isinstance(each, cst.If)
            and isinstance(each.test, cst.Comparison)
            and script.code(each.test.left) == "__name__"
            and isinstance(each.body, cst.IndentedBlock)
        ):
            return each
    return None


def _runs_on_import(script: Script, guard: cst.If, places: Iterable[cst.CSTNode]) -> bool:
    """Return whether code that is to change may run before the guard's block does."""

    def is_early(node: cst.CSTNode) -> bool:
        return script.function_of(node) is None and not script.inside(node, guard)

    calls = [call for call in script.calls if is_early(call) and script.called(call) is not None]
    return bool(calls) or any(map(is_early, places))


# Rank 0 alone -------------------------------------------------------------------------------------


def statement_line(script: Script, call: cst.Call) -> cst.SimpleStatementLine | None:
    """Return the line that is nothing but this call; None: there is none."""
    expression = script.parent(call)
    line = script.statement_of(call)
    if isinstance(expression, cst.Expr) and isinstance(line, cst.SimpleStatementLine):
        return line
    return None


def prints_in(
    script: Script, functions: set[cst.FunctionDef | None]
) -> list[cst.SimpleStatementLine]:
    """Return prints that a rank can leave out: nothing that they call changes anything."""
    found = []
    for call in script.calls_of("builtins.print"):
        line = statement_line(script, call)
        to_file = keyword(call, "file") is not None
        inner = script.nodes(call, cst.Call)[1:]
        if line is None or to_file or script.function_of(call) not in functions:
            continue
        if all(_is_harmless(script, each) for each in inner):
            found.append(line)
    return found


def _is_harmless(script: Script, call: cst.Call) -> bool:
    if script.name(call) in _HARMLESS_FUNCTIONS:
        return True
    return not script.name(call) and attribute_call(call, *_HARMLESS_METHODS) is not None


def only_on_rank_0(
    edits: Edits,
    prints: Iterable[cst.SimpleStatementLine],
    saves: Iterable[cst.SimpleStatementLine],
) -> None:
    """Let rank 0 print, and write files; neighbours share a condition."""
    script = edits.script
    prints, saves = list(prints), list(saves)
    todo = sorted({*prints, *saves}, key=script.line)
    groups: list[list[cst.SimpleStatementLine]] = []
    for line in todo:
        block = script.block_of(line)
        index = _index(block, line)
        if groups and index > 0 and block[index - 1] is groups[-1][-1]:
            groups[-1].append(line)
        else:
            groups.append([line])
    for group in groups:
        edits.only_on_rank_0(group)
    for lines, text in (
        (prints, "every rank runs the whole script: one prints"),
        (saves, "all ranks have the same weights: one writes them"),
    ):
        if lines:
            also = ", ".join(str(script.line(line)) for line in lines[1:])
            edits.why(lines[0], text + (f" (also line {also})" if also else ""))


def _index(block: Sequence[cst.CSTNode], line: cst.CSTNode) -> int:
    return next(index for index, each in enumerate(block) if each is line)


# Learning rates -----------------------------------------------------------------------------------


def scale_rate(edits: Edits, given: cst.Arg | None, call: cst.Call, *, is_sgd: bool) -> None:
    """Multiply SGD's learning rate by the number of ranks; leave other optimizers' to the user."""
    kv, script = edits.kv, edits.script
    if not is_sgd or given is None:
        edits.look(
            call,
            "the learning rate stays as it is. A batch of all ranks is "
            f"{kv}.size() times as large: SGD bears a rate as many times as high, others often "
            "less; try",
        )
        return
    value = given.value
    schedules = [
        origin for origin in script.origins(value)
        if isinstance(origin, cst.Call) and script.name(origin) in _SCHEDULES
    ]  # fmt: skip
    if schedules:
        for schedule in schedules:
            name, index = _SCHEDULES[script.name(schedule)]
            rate = argument(schedule, name, index)
            if rate is not None and rate.value not in edits.places:
                scale_rate(edits, rate, schedule, is_sgd=True)
        return
    plain = isinstance(value, cst.Name | cst.Attribute | cst.Integer | cst.Float | cst.Subscript)
    if not plain or any(isinstance(each, cst.Call) for each in _made_here(script, value)):
        edits.look(value, f"this is SGD's learning rate: multiply it by {kv}.size()")
        return
    edits.replace(value, f"{script.code(value)} * {kv}.size()")
    edits.why(value, f"a batch {kv}.size() times as large bears a rate as many times as high")


def _made_here(script: Script, value: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what a name is from, other than numbers that a conversion such as float() makes."""
    return [
        each for each in script.origins(value)
        if not script.name(each).startswith(("builtins.", "os."))
    ]  # fmt: skip


def look_at_counts(edits: Edits) -> None:
    """Say which schedules of Keras and optax count steps in numbers that were not divided."""
    script, kv = edits.script, edits.kv
    for call in script.calls:
        name = script.name(call)
        counts = [each.value for each in call.args[1:]]
        if (
            name in _SCHEDULES
            and name != "optax.constant_schedule"
            and not any(says_steps_of(script, each, edits) for each in counts)
        ):
            edits.look(
                call,
                "this schedule counts steps, of which a rank takes "
                f"1/{kv}.size() as many in an epoch: divide its counts by {kv}.size()",
            )

"""PyTorch's training loops: schedules, early ends of loops, and what a person must decide."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.common import scale_rate
from kolovod.migrate.edits import Edits
from kolovod.migrate.loops import EnclosingLoop
from kolovod.migrate.schedules import says_steps_of
from kolovod.migrate.script import Loop, Script, argument, attribute_call, keyword
from kolovod.migrate.torch_data import loop_is_shared

__all__ = ["advise"]

_RATES = {
    "torch.optim.lr_scheduler.OneCycleLR": {"max_lr": 1},
    "torch.optim.lr_scheduler.CyclicLR": {"base_lr": 1, "max_lr": 2},
}
"""By schedule that has rates of its own: which arguments these are, and their places."""


def advise(edits: Edits, ways: list[list[EnclosingLoop]], optimizers: list[cst.Call]) -> None:
    """Say what a person must decide, and let ranks decide together where a loop may end early."""
    script, kv = edits.script, edits.kv
    inner = {way[0].loop: None for way in ways if way}
    for loop in inner:
        edits.look(
            loop,
            "losses and accuracies of this loop are of this rank's part of the data: "
            f"average what is shown, by {kv}.average_metrics({{...}}) on all ranks",
        )
        _warn_of_loop(edits, loop)
    for way in ways:
        for place in way[1:]:
            _leave_together(edits, place)
    if optimizers and all(script.name(each) == "torch.optim.SGD" for each in optimizers):
        _scale_what_is_set(edits)
    for call in script.calls:
        name = script.name(call)
        if name.startswith("torch.optim.lr_scheduler."):
            _look_at_schedule(edits, call, inner, optimizers)
        if name == "torch.optim.lr_scheduler.ReduceLROnPlateau":
            edits.look(
                call,
                "all ranks must step it with the same number: average a loss of a "
                f"rank's own data by {kv}.average_metrics before",
            )
        elif name in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            edits.look(
                call,
                "DataParallel uses all GPUs of a host in one process: leave it out, "
                "each rank has one",
            )
        elif name.endswith(".SummaryWriter") or name in ("wandb.init", "mlflow.start_run"):
            edits.look(call, f"each rank makes one: let {kv}.rank() == 0 alone log")
        elif (download := keyword(call, "download")) and script.code(download.value) == "True":
            edits.look(call, "all ranks of a host would download at once: do it before the job")


def _scale_what_is_set(edits: Edits) -> None:
    """Scale rates that the script gives its parameter groups itself, which replace SGD's own."""
    script, kv = edits.script, edits.kv
    for assign in script.nodes(script.module, cst.Assign):
        target = script.code(assign.targets[0].target)
        if not target.endswith(('["lr"]', "['lr']")) or "lr" in {
            each.evaluated_value for each in script.nodes(assign.value, cst.SimpleString)
        }:
            continue
        plain = isinstance(assign.value, cst.Name | cst.Attribute | cst.Call | cst.Float)
        code = script.code(assign.value)
        edits.replace(assign.value, f"{code if plain else f'({code})'} * {kv}.size()")
        edits.why(assign, f"a batch {kv}.size() times as large bears a rate as many times as high")


def _look_at_schedule(
    edits: Edits, call: cst.Call, inner: dict[Loop, None], optimizers: list[cst.Call]
) -> None:
    """Scale a schedule's own rates, and say where its counts are not those of a rank."""
    script, kv = edits.script, edits.kv
    first = argument(call, "optimizer", 0)
    stepped = script.origins(first.value) if first is not None else optimizers
    is_sgd = all(script.name(each) == "torch.optim.SGD" for each in stepped)
    for name, index in _RATES.get(script.name(call), {}).items():
        if is_sgd and (given := argument(call, name, index)) is not None:
            scale_rate(edits, given, call, is_sgd=True)
    target = script.target_of(call)
    steps = [
        each for loop in inner for each in script.nodes(loop, cst.Call)
        if isinstance(loop, cst.For) and loop_is_shared(edits, loop)
        and (stepper := attribute_call(each, "step")) is not None
        and target is not None
        and (script.code(stepper) == script.code(target) or call in script.origins(stepper))
    ]  # fmt: skip
    counts = [each.value for each in call.args[1:]]
    if not steps or script.name(call).endswith("ReduceLROnPlateau"):
        return
    if not any(says_steps_of(script, each, edits) for each in counts):
        edits.look(
            call,
            "this schedule is stepped in each batch, of which a rank has "
            f"1/{kv}.size() as many: divide its counts of steps by {kv}.size()",
        )
    elif script.name(call).endswith(".OneCycleLR") and any(
        each in edits.places
        for value in counts
        for each in script.nodes(value, cst.BinaryOperation)
    ):
        edits.look(
            call, "it refuses a step too many: len(loader) says exactly how many an epoch has"
        )


def _warn_of_loop(edits: Edits, loop: cst.CSTNode) -> None:
    script, kv = edits.script, edits.kv
    for call in script.nodes(loop, cst.Call):
        if attribute_call(call, "step") is None:
            continue
        conditions = [
            each for each in script.ancestors(call)
            if isinstance(each, cst.If) and script.inside(each, loop)
        ]  # fmt: skip
        if any("%" in script.code(each.test) for each in conditions):
            edits.look(
                call,
                "steps after several backward passes: give DistributedOptimizer "
                "backward_passes_per_step=N, or it sends gradients in each",
            )
    function = script.function_of(loop)
    for call in script.nodes(function or script.module, cst.Call):
        if script.name(call) != "builtins.len" or not call.args:
            continue
        code = script.code(call.args[0].value)
        if code.endswith(".dataset"):
            edits.look(
                call,
                f"{script.code(call)} is of all ranks' data: what this rank adds up "
                f"over a shared loader is 1/{kv}.size() of that",
            )


def _leave_together(edits: Edits, place: EnclosingLoop) -> None:
    """Let all ranks leave a loop by what rank 0 decides, so that none waits for one that has."""
    script, kv = edits.script, edits.kv
    for each in script.nodes(place.loop, cst.Break):
        around = script.loops_around(each)
        if not around or around[0] is not place.loop:
            continue
        condition = next(
            x for x in script.ancestors(each) if isinstance(x, cst.If | cst.For | cst.While)
        )
        if isinstance(condition, cst.If) and _is_counted(script, condition.test):
            continue
        if isinstance(condition, cst.If) and any(x is condition for x in place.loop.body.body):
            if condition in edits.places:
                continue
            test = script.code(condition.test)
            edits.replace(condition.test, f"{kv}.broadcast_object(bool({test}), root_rank=0)")
            edits.why(each, "rank 0 decides when all leave the loop")
            continue
        edits.look(
            each,
            "a rank that leaves this loop alone lets the others wait: decide by "
            f"what all ranks know, {kv}.average_metrics say",
        )


def _is_counted(script: Script, test: cst.BaseExpression) -> bool:
    """Return whether a condition is of numbers that all ranks count alike."""
    if any(script.nodes(test, kind) for kind in (cst.Call, cst.Subscript)):
        return False
    for name in script.nodes(test, cst.Name):
        changed = [
            each.value for each in script.nodes(script.module, cst.AugAssign)
            if script.code(each.target) == name.value
        ]  # fmt: skip
        here = script.function_of(name)
        changed += [value for _, value, _ in script.assignments(name.value, here)]
        if not all(isinstance(each, cst.Integer | cst.Float) for each in changed):
            return False
        if not changed and not any(
            script.code(each.target) == name.value for each in script.nodes(script.module, cst.For)
        ):
            return False
    return True

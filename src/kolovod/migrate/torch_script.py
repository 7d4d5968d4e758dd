"""PyTorch's training loops on one process: what makes them distributed."""

from __future__ import annotations

import re

import libcst as cst

from kolovod.migrate.common import (
    only_on_rank_0,
    place_import_and_init,
    prints_in,
    scale_rate,
    statement_line,
)
from kolovod.migrate.edits import Edits, wrapped
from kolovod.migrate.loops import Place, chains, functions_of
from kolovod.migrate.script import Script, argument, attribute_call, keyword
from kolovod.migrate.torch_data import share_loaders

__all__ = ["distribute"]

_OPTIMIZER = re.compile(r"torch\.optim\.(\w+\.)?[A-Z]\w*$")
_NOT_ONE = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.", "torch.optim.Optimizer")
_STEPS_WITH_CLOSURE = "torch.optim.LBFGS"
_RATES = ("torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.CyclicLR")


def distribute(edits: Edits) -> None:
    """Plan the changes, or say what keeps the script from being changed."""
    script = edits.script
    steps = [call for call in script.calls if attribute_call(call, "backward") is not None]
    optimizers = _optimizers(script)
    if not steps or not optimizers:
        what = "call of backward()" if not steps else "optimizer of torch.optim"
        edits.need(None, f"no {what} is in this script: what trains must be changed where it is")
        return
    edits.kv = script.unused("kv", "kolovod_torch")
    ways = [way for step in steps for way in chains(script, step)]
    for call in optimizers:
        _distribute_optimizer(edits, call)
    if not edits:
        return
    _agree_on_what_was_read(edits)
    imports = share_loaders(edits, ways)
    functions = functions_of(script, [*steps, *optimizers])
    only_on_rank_0(edits, prints_in(script, functions), _saves(edits))
    _warn(edits, ways, optimizers)
    _choose_gpu(edits, imports)


def _optimizers(script: Script) -> list[cst.Call]:
    found = [call for call in script.calls if _OPTIMIZER.match(script.name(call))]
    return [call for call in found if not script.name(call).startswith(_NOT_ONE)]


# Optimizers ---------------------------------------------------------------------------------------


def _distribute_optimizer(edits: Edits, call: cst.Call) -> None:
    """Let it average gradients, and let the ranks start equal."""
    script, kv = edits.script, edits.kv
    if script.name(call) == _STEPS_WITH_CLOSURE:
        edits.need(
            call,
            "LBFGS calls the model several times in a step: ranks must take each of "
            "its decisions together; use another optimizer",
        )
        return
    statement, assigned = script.statement_of(call), script.target_of(call)
    models = _models(script, call)
    named = f"named_parameters={models[0]}.named_parameters()" if len(models) == 1 else ""
    more = [named] if named else []
    if statement is None or assigned is None:
        wrapped(edits, call, f"{kv}.DistributedOptimizer", *more)
    else:
        target = script.code(assigned)
        block = script.block_of(statement)
        loads = _loads_after(script, block, statement)
        for model in models:
            edits.after(loads or statement, f"{kv}.broadcast_parameters({model}.state_dict())")
        if loads is not None:
            edits.after(loads, f"{kv}.broadcast_optimizer_state({target})")
            edits.why(loads, "all ranks go on with what rank 0 has read")
        arguments = ", ".join([target, *more])
        edits.after(statement, f"{target} = {kv}.DistributedOptimizer({arguments})")
    edits.why(call, "each gradient is averaged over all ranks while backward goes on")
    if models and statement is not None and assigned is not None:
        edits.why(call, "all ranks start with rank 0's weights")
    else:
        edits.need(
            call,
            "all ranks must start with the same weights: call "
            f"{kv}.broadcast_parameters(model.state_dict()) before training",
        )
    is_sgd = script.name(call) == "torch.optim.SGD"
    scale_rate(edits, argument(call, "lr", 1), call, is_sgd=is_sgd)


def _models(script: Script, call: cst.Call) -> list[str]:
    """Return the modules whose parameters it steps, as expressions that are valid beside it."""
    given = argument(call, "params", 0)
    if given is None:
        return []
    values = [given.value]
    if isinstance(given.value, cst.Name):
        function = script.function_of(call)
        values += [value for _, value, _ in script.assignments(given.value.value, function)]
    found: dict[str, None] = {}
    for value in values:
        for inner in [value, *script.nodes(value, cst.Call)]:
            if not isinstance(inner, cst.Call):
                continue
            model = attribute_call(inner, "parameters", "named_parameters")
            if isinstance(model, cst.Name | cst.Attribute):
                found[_whole(script, model)] = None
    return list(found)


def _whole(script: Script, model: cst.Name | cst.Attribute) -> str:
    """Return the model whose part it is: of "model.head" that is "model"; self.model is one."""
    code = script.code(model)
    parts = code.split(".")
    return ".".join(parts[:2]) if parts[0] == "self" else parts[0]


def _loads_after(
    script: Script, block: object, statement: cst.BaseStatement
) -> cst.BaseStatement | None:
    """Return the last statement of the block that reads a checkpoint, after ``statement``."""
    assert isinstance(block, list | tuple)
    seen, found = False, None
    for each in block:
        if seen and isinstance(each, cst.BaseStatement):
            if isinstance(each, cst.For | cst.While | cst.FunctionDef | cst.ClassDef):
                continue
            calls = script.nodes(each, cst.Call)
            if any(attribute_call(call, "load_state_dict") is not None for call in calls):
                found = each
        seen = seen or each is statement
    return found


def _agree_on_what_was_read(edits: Edits) -> None:
    """Broadcast what is read from a checkpoint besides states: the epoch to go on with, say."""
    script, kv = edits.script, edits.kv
    for call in script.calls_of("torch.load"):
        read, function = script.target_of(call), script.function_of(call)
        if read is None:
            continue
        for assign in script.nodes(function or script.module, cst.Assign):
            name = script.code(assign.targets[0].target)
            if script.function_of(assign) is not function or not _takes_from(
                script, assign, script.code(read)
            ):
                continue
            around = _condition_around(script, assign)
            if around is None or _is_state(script, name, function):
                continue
            is_sure = around is script.statement_of(assign)
            if is_sure or len(script.assignments(name, function)) > 1:
                edits.after(around, f"{name} = {kv}.broadcast_object({name}, root_rank=0)")
                edits.why(around, f"{name} is what rank 0 has read: the others may have no file")


def _takes_from(script: Script, assign: cst.Assign, read: str) -> bool:
    """Return whether a name gets a part of what is named ``read``."""
    if not isinstance(assign.targets[0].target, cst.Name):
        return False
    parts = [each.value for each in script.nodes(assign.value, cst.Subscript)]
    gets = [attribute_call(each, "get") for each in script.nodes(assign.value, cst.Call)]
    return any(script.code(each) == read for each in [*parts, *gets] if each is not None)


def _is_state(script: Script, name: str, function: cst.FunctionDef | None) -> bool:
    """Return whether the name is given to load_state_dict."""
    return any(
        attribute_call(call, "load_state_dict") is not None
        and any(script.code(each.value) == name for each in call.args)
        for call in script.nodes(function or script.module, cst.Call)
    )


def _condition_around(script: Script, node: cst.CSTNode) -> cst.BaseStatement | None:
    """Return the outermost statement around it that may leave it out and has no loop; else its own.

    None: it is in a loop itself.
    """
    outermost = script.statement_of(node)
    for each in script.ancestors(node):
        if isinstance(each, cst.For | cst.While):
            return None
        if isinstance(each, cst.If | cst.Try | cst.With):
            if script.nodes(each, cst.For) or "__name__" in script.code(each).splitlines()[0]:
                break
            outermost = each
        elif isinstance(each, cst.FunctionDef):
            break
    return outermost


# Files and GPUs -----------------------------------------------------------------------------------


def _saves(edits: Edits) -> list[cst.SimpleStatementLine]:
    script, found = edits.script, []
    for call in script.calls_of("torch.save"):
        line = statement_line(script, call)
        if line is None or _of_dataset(script, call):
            edits.look(call, f"let only {edits.kv}.rank() == 0 write this file")
            continue
        found.append(line)
    return found


def _of_dataset(script: Script, node: cst.CSTNode) -> bool:
    """Return whether the node is in a class of data, whose files are no checkpoints."""
    owner = script.class_of(node)
    return owner is not None and any(
        script.name(base.value).startswith("torch.utils.data.") for base in owner.bases
    )


def _choose_gpu(edits: Edits, imports: list[str]) -> None:
    """Import Kolovod and form the world; with GPUs let each rank take one."""
    script, kv = edits.script, edits.kv
    torch = script.module_name("torch")
    strings = script.nodes(script.module, cst.SimpleString)
    devices = [each for each in strings if re.fullmatch(r"cuda(:\d+)?", each.raw_value)]
    with_gpus = bool(devices) or any(
        attribute_call(call, "cuda") is not None for call in script.calls
    )
    numbered = {each.raw_value for each in devices if ":" in each.value}
    if numbered == {"cuda:0"}:
        for each in devices:
            if ":" in each.value:
                edits.replace(each, each.value.replace("cuda:0", "cuda"))
                edits.why(each, "the GPU of this rank, not the host's first")
    elif numbered:
        several = ", ".join(sorted(numbered))
        edits.look(
            devices[0],
            f"the script uses several GPUs by number ({several}): "
            "each rank should have one of its own",
        )
    then = ""
    if with_gpus and torch and len(numbered) <= 1:
        indent = script.module.default_indent
        then = (
            f"if {torch}.cuda.is_available():\n{indent}{torch}.cuda.set_device("
            f"{kv}.local_rank() % {torch}.cuda.device_count())\n"
        )
    elif with_gpus:
        edits.look(None, f"let each rank use a GPU of its own: {kv}.local_rank() says which")
    place_import_and_init(edits, ["torch"], "kolovod.torch", *imports, then=then)


# What a person must decide -----------------------------------------------------------------------


def _warn(edits: Edits, ways: list[list[Place]], optimizers: list[cst.Call]) -> None:
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
            _warn_of_breaks(edits, place)
    for call in script.calls:
        name = script.name(call)
        if name in _RATES:
            edits.look(
                call,
                "this schedule has learning rates of its own: multiply them as the optimizer's",
            )
        elif name == "torch.optim.lr_scheduler.ReduceLROnPlateau":
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
        elif name == "torch.utils.data.random_split" and not _is_seeded(script, call):
            edits.look(
                call,
                "each rank would split the data in another way: seed it "
                "(generator=torch.Generator().manual_seed(7))",
            )
        elif name == "sklearn.model_selection.train_test_split" and not keyword(
            call, "random_state"
        ):
            edits.look(call, "each rank would split the data in another way: give it random_state")
        elif name == "torch.load" and script.calls_of("torch.save"):
            edits.look(
                call,
                f"rank 0 alone writes: {kv}.barrier() before, if this reads what this "
                "run has written",
            )
        elif name.endswith(".SummaryWriter") or name in ("wandb.init", "mlflow.start_run"):
            edits.look(call, f"each rank makes one: let {kv}.rank() == 0 alone log")
        elif (download := keyword(call, "download")) and script.code(download.value) == "True":
            edits.look(call, "all ranks of a host would download at once: do it before the job")


def _is_seeded(script: Script, call: cst.Call) -> bool:
    return bool(keyword(call, "generator") or script.calls_of("torch.manual_seed"))


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


def _warn_of_breaks(edits: Edits, place: Place) -> None:
    script = edits.script
    for each in script.nodes(place.loop, cst.Break):
        around = script.loops_around(each)
        if around and around[0] is place.loop:
            edits.look(
                each,
                "a rank that leaves this loop alone lets the others wait: decide by "
                f"what all ranks know, {edits.kv}.average_metrics say",
            )

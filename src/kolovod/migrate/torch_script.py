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
from kolovod.migrate.loops import EnclosingLoop, callers_of, chains, functions_of
from kolovod.migrate.random_numbers import equal_data
from kolovod.migrate.script import Script, argument, attribute_call
from kolovod.migrate.torch_advice import advise
from kolovod.migrate.torch_data import share_loaders

__all__ = ["distribute"]

_OPTIMIZER = re.compile(r"torch\.optim\.(\w+\.)?[A-Z]\w*$")
_NOT_ONE = ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.", "torch.optim.Optimizer")
_STEPS_WITH_CLOSURE = "torch.optim.LBFGS"
_NORMS = (
    *(f"torch.nn.{lazy}BatchNorm{d}d" for d in (1, 2, 3) for lazy in ("", "Lazy")),
    "torchvision.models.",
)
_DEPTH = 5


def distribute(edits: Edits) -> None:
    """Plan the changes, or say what keeps the script from being changed."""
    script = edits.script
    steps = [call for call in script.calls if attribute_call(call, "backward") is not None]
    optimizers = _optimizers(script)
    if not steps or not optimizers:
        what = "no call of backward() is in this script: what trains must be changed where it is"
        if steps:
            what = (
                "no optimizer of torch.optim is in this script: import kolovod.torch as kv, call "
                "kv.init(), after backward() p.grad = kv.allreduce(p.grad) for each parameter, "
                "and give each rank its own part of the data"
            )
        edits.need(steps[0] if steps else None, what)
        return
    edits.kv = script.unused("kv", "kolovod_torch")
    ways = [way for step in steps for way in chains(script, step)]
    for call in optimizers:
        _distribute_optimizer(edits, call, steps)
    if not edits:
        return
    _agree_on_what_was_read(edits)
    imports = share_loaders(edits, ways)
    functions = functions_of(script, [*steps, *optimizers])
    saves = _saves(edits)
    only_on_rank_0(edits, prints_in(script, functions), saves)
    if saves:
        for call in script.calls_of("torch.load"):
            _wait_for_file(edits, call)
    _equal_buffers(edits, ways, optimizers)
    advise(edits, ways, optimizers)
    _choose_gpu(edits, imports, ways)


def _optimizers(script: Script) -> list[cst.Call]:
    found = [call for call in script.calls if _OPTIMIZER.match(script.name(call))]
    return [call for call in found if not script.name(call).startswith(_NOT_ONE)]


# Optimizers ---------------------------------------------------------------------------------------


def _distribute_optimizer(edits: Edits, call: cst.Call, steps: list[cst.Call]) -> None:
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
    tensors = _tensors(script, call) if not models else []
    named = f"named_parameters={models[0]}.named_parameters()" if len(models) == 1 else ""
    more = [named] if named else []
    equal = [f"{kv}.broadcast_parameters({model}.state_dict())" for model in models]
    if tensors:
        pairs = ", ".join(f'"{name}": {name}' for name in tensors)
        equal = [f"{kv}.broadcast_parameters({{{pairs}}})"]
    if statement is None or assigned is None:
        wrapped(edits, call, f"{kv}.DistributedOptimizer", *more)
        if statement is not None:
            for text in equal:
                edits.before(statement, text)
    else:
        target = script.code(assigned)
        block = script.block_of(statement)
        loads = _loads_after(script, block, statement, steps)
        for text in equal:
            edits.after(loads or statement, text)
        if loads is not None:
            edits.after(loads, f"{kv}.broadcast_optimizer_state({target})")
            edits.why(loads, "all ranks go on with what rank 0 has read")
        arguments = ", ".join([target, *more])
        edits.after(statement, f"{target} = {kv}.DistributedOptimizer({arguments})")
    edits.why(call, "each gradient is averaged over all ranks while backward goes on")
    if equal and statement is not None:
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


def _tensors(script: Script, call: cst.Call) -> list[str]:
    """Return the names of single tensors that it steps."""
    given = argument(call, "params", 0)
    origins = script.origins(given.value) if given is not None else []
    if len(origins) != 1 or not isinstance(origins[0], cst.List):
        return []
    elements = [each.value for each in origins[0].elements]
    names = [each.value for each in elements if isinstance(each, cst.Name)]
    return names if len(names) == len(elements) else []


def _whole(script: Script, model: cst.Name | cst.Attribute) -> str:
    """Return the model whose part it is: of "model.head" that is "model"; self.model is one."""
    code = script.code(model)
    parts = code.split(".")
    return ".".join(parts[:2]) if parts[0] == "self" else parts[0]


def _loads_after(
    script: Script, block: object, statement: cst.BaseStatement, steps: list[cst.Call]
) -> cst.BaseStatement | None:
    """Return the last statement that reads a checkpoint, after ``statement``, before training."""
    assert isinstance(block, list | tuple)
    seen, found = False, None
    training = callers_of(script, steps) - {None}
    for each in block:
        if seen and isinstance(each, cst.BaseStatement):
            called = [script.called(call) for call in script.nodes(each, cst.Call)]
            if training & {*called} or any(script.inside(step, each) for step in steps):
                break
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


def _wait_for_file(edits: Edits, call: cst.Call) -> None:
    """Let all ranks wait for rank 0, which writes what they read here."""
    script, kv = edits.script, edits.kv
    edits.look(
        call, "rank 0 alone writes, and all ranks read this: their hosts must share the file"
    )
    node: cst.CSTNode = call
    depth = 0
    while (function := script.function_of(node)) is not None and depth < _DEPTH:
        sites = script.call_sites(function)
        if len(sites) != 1 or _condition_around(script, sites[0]) is script.statement_of(sites[0]):
            break  # else only some ranks may come here
        node, depth = sites[0], depth + 1
    place = _condition_around(script, node)
    if place is None:
        edits.look(call, f"{kv}.barrier() before this, if it reads what this run has written")
        return
    edits.before(place, f"{kv}.barrier()")
    edits.why(call, "no rank reads before rank 0 has written")


# BatchNorm ----------------------------------------------------------------------------------------


def _equal_buffers(
    edits: Edits, ways: list[list[EnclosingLoop]], optimizers: list[cst.Call]
) -> None:
    """Give all ranks rank 0's running statistics after each epoch, as they judge the model by them.

    A schedule or a stop that looks at a validation loss would else decide otherwise on each rank.
    """
    script, kv = edits.script, edits.kv
    if not script.calls_of(*_NORMS):
        return
    models = {name: call for call in optimizers for name in _models(script, call)}
    for loop in {way[0].loop: None for way in ways if way}:
        names = [_name_at(script, name, call, loop) for name, call in models.items()]
        if not names or not all(names) or not isinstance(loop, cst.For):
            edits.look(
                loop,
                "BatchNorm's running statistics are of each rank's own data: before the model is "
                f"evaluated {kv}.broadcast_parameters(model.named_buffers()), on all ranks",
            )
            continue
        for name in names:
            edits.after(loop, f"{kv}.broadcast_parameters({name}.named_buffers())")
        edits.why(
            loop, "BatchNorm's running statistics are of each rank's own data: all take rank 0's"
        )


def _name_at(script: Script, model: str, beside: cst.Call, loop: cst.CSTNode) -> str:
    """Return how a model is called in the function of a loop; "": that is not seen."""
    function, owner = script.function_of(loop), script.class_of(loop)
    if script.function_of(beside) in (function, None) and "." not in model:
        return model
    if model.startswith("self.") and owner is not None and owner is script.class_of(beside):
        return model
    for call in script.call_sites(function) if function is not None else []:
        assert function is not None
        for each in function.params.params:
            given = script.given(call, function, each.name.value)
            if given is not None and script.code(given) == model:
                return each.name.value
    return ""


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


def _choose_gpu(edits: Edits, imports: list[str], ways: list[list[EnclosingLoop]]) -> None:
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
    then = equal_data(edits, ways)
    if with_gpus and torch and len(numbered) <= 1:
        indent = script.module.default_indent
        text = (
            f"if {torch}.cuda.is_available():\n{indent}{torch}.cuda.set_device("
            f"{kv}.local_rank() % {torch}.cuda.device_count())\n"
        )
        then.insert(0, (text, "each rank of a host takes a GPU of its own"))
    elif with_gpus:
        edits.look(None, f"let each rank use a GPU of its own: {kv}.local_rank() says which")
    place_import_and_init(edits, ["torch"], "kolovod.torch", *imports, then=then)

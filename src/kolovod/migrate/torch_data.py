"""PyTorch's loaders: each rank reads its own part of the data, in another order in each epoch."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.edits import Edits, with_argument
from kolovod.migrate.loops import EnclosingLoop, seen_from
from kolovod.migrate.rows import share_batches
from kolovod.migrate.schedules import divide_counts
from kolovod.migrate.script import Script, argument, keyword

__all__ = ["LOADER", "loop_is_shared", "share_loaders"]

LOADER = "torch.utils.data.DataLoader"
_EPOCHS = (
    "at the beginning of each epoch call set_epoch(epoch) of the loader's sampler, or the order is "
    "the same in each"
)
_WEIGHTED = "torch.utils.data.WeightedRandomSampler"
_ORDERS = {
    "torch.utils.data.RandomSampler": "True",
    "torch.utils.data.SequentialSampler": "False",
    "torch.utils.data.sampler.RandomSampler": "True",
    "torch.utils.data.sampler.SequentialSampler": "False",
}
"""By sampler that takes each sample once: the ``shuffle`` that means the same."""
_SAMPLER = "torch.utils.data.DistributedSampler"


def share_loaders(edits: Edits, ways: list[list[EnclosingLoop]]) -> list[str]:
    """Give the loaders of training loops a sampler; return the imports that this needs.

    ``ways``: the loops around each training step.
    """
    script = edits.script
    every = script.calls_of(LOADER)
    if not every:
        for way in ways:
            share_batches(edits, way)
        return []
    found: dict[cst.Call, None] = {}
    epochs: list[tuple[cst.Call, cst.BaseExpression, list[EnclosingLoop]]] = []
    for way in ways:
        for index, place in enumerate(way):
            loaders = _loaders_of(script, place)
            for loader, name in loaders:
                found[loader] = None
                epochs.append((loader, name, way[index + 1 :]))
            if loaders:
                break
    if not found:
        found = {call: None for call in every if _shuffles(call)}
    if not found:
        edits.need(
            every[0],
            "which loader is for training cannot be seen: give that one a "
            f"DistributedSampler(dataset, num_replicas={edits.kv}.size(), "
            f"rank={edits.kv}.rank())",
        )
        return []
    shared = {call: _share(edits, call) for call in found}
    _divide_counts(edits, [call for call, sampler in shared.items() if sampler])
    for call in every:
        if call not in found:
            edits.look(
                call,
                "this loader stays whole: each rank reads all of it, so that "
                "evaluation says the same on every rank",
            )
    _start_epochs(edits, {call: sampler for call, sampler in shared.items() if sampler}, epochs)
    if not any(shared.values()) or script.calls_of(_SAMPLER):
        return []
    return ["from torch.utils.data import DistributedSampler"]


def _divide_counts(edits: Edits, loaders: list[cst.Call]) -> None:
    script = edits.script
    for call in loaders:
        dataset, size = argument(call, "dataset", 0), argument(call, "batch_size", 1)
        target = script.target_of(call)
        names = [script.code(dataset.value)] if dataset is not None else []
        if target is not None:
            names.append(f"{script.code(target)}.dataset")
        divide_counts(edits, names, [size.value] if size is not None else [])


def _loaders_of(script: Script, place: EnclosingLoop) -> list[tuple[cst.Call, cst.BaseExpression]]:
    """Return the loaders that a loop goes through, with the names it has them by."""
    if not isinstance(place.loop, cst.For):
        return []
    found = []
    names = script.iterated(place.loop.iter) or [place.loop.iter]
    for name in names:
        for origin in script.origins(name):
            if isinstance(origin, cst.Call) and script.name(origin) == LOADER:
                found.append((origin, name))
    return found


def loop_is_shared(edits: Edits, loop: cst.For) -> bool:
    """Return whether a loop goes through a loader that was given a sampler."""
    return any(
        loader in edits.places for loader, _ in _loaders_of(edits.script, EnclosingLoop(loop, ()))
    )


def _shuffles(call: cst.Call) -> bool:
    given = argument(call, "shuffle", 2)
    return given is not None and isinstance(given.value, cst.Name) and given.value.value == "True"


def _share(edits: Edits, call: cst.Call) -> str:
    """Give a loader a sampler, and return how it is called there; "" if that is not possible."""
    script, kv = edits.script, edits.kv
    if _draw_fewer(edits, call):
        return ""
    if reason := _not_shared(script, call):
        edits.need(call, f"this loader is left as it is, so all ranks read the same: {reason}")
        return ""
    dataset, shuffle = argument(call, "dataset", 0), argument(call, "shuffle", 2)
    statement = script.statement_of(call)
    assert dataset is not None
    assert statement is not None
    target = _target(script, call)
    text = script.code(dataset.value)
    if not isinstance(dataset.value, cst.Name | cst.Attribute):
        wish = target.replace("_loader", "").replace("loader", "") or "train"
        name = script.unused(f"{wish}_data")
        edits.before(statement, f"{name} = {text}")
        edits.replace(dataset.value, name)
        text = name
    # The default of a sampler is to shuffle, that of a loader is not to.
    order = script.code(shuffle.value) if shuffle is not None else "False"
    order = _plain_order(script, call) or order
    if (options := _options(call)) is not None:
        order = f'{script.code(options.value)}.get("shuffle", False)'
    wish = target.replace("loader", "sampler") if "loader" in target else f"{target}_sampler"
    sampler = script.unused(wish.lstrip("_"))
    edits.before(
        statement,
        f"{sampler} = {_sampler_name(script)}({text}, num_replicas={kv}.size(), "
        f"rank={kv}.rank(), shuffle={order})",
    )
    edits.change(call, lambda new: _with_sampler(new, edits.expression(sampler)))
    edits.why(
        call,
        "each rank reads its own part of the dataset; its batches have the same size "
        f"as before, so all ranks' together are {kv}.size() times as large",
    )
    return sampler


def _draw_fewer(edits: Edits, call: cst.Call) -> bool:
    """Let a sampler that draws by weights draw a rank's part; return False if there is none."""
    script, kv = edits.script, edits.kv
    given = keyword(call, "sampler")
    origins = script.origins(given.value) if given is not None else []
    torch = script.module_name("torch")
    if len(origins) != 1 or script.name(origins[0]) != _WEIGHTED or not torch:
        return False
    sampler = origins[0]
    assert isinstance(sampler, cst.Call)
    count = argument(sampler, "num_samples", 1)
    if count is None or keyword(sampler, "generator") or script.statement_of(sampler) is None:
        return False
    if sampler not in edits.places:
        number = script.code(count.value)
        whole = (
            number if isinstance(count.value, cst.Integer | cst.Name | cst.Call) else f"({number})"
        )
        edits.replace(count.value, f"{whole} // {kv}.size()")
        own = edits.expression(f"{torch}.Generator().manual_seed({kv}.rank())")
        edits.change(sampler, lambda new: with_argument(new, "generator", own))
        edits.why(sampler, f"each rank draws 1/{kv}.size() of the samples, others than other ranks")
    return True


def _with_sampler(call: cst.Call, sampler: cst.BaseExpression) -> cst.Call:
    """Return the call with a sampler, in the place of shuffle if it has that."""
    if (given := _options(call)) is not None:
        plain = cst.parse_expression('{**options, "shuffle": False}')
        assert isinstance(plain, cst.Dict)
        first = cst.StarredDictElement(given.value, comma=plain.elements[0].comma)
        unshuffled = plain.with_changes(elements=[first, *plain.elements[1:]])
        others = [arg.with_changes(value=unshuffled) if arg is given else arg for arg in call.args]
        added = with_argument(call.with_changes(args=call.args[:-1]), "sampler", sampler).args[-1]
        added = added.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return call.with_changes(args=[*others[:-1], added, others[-1]])
    given = keyword(call, "sampler") or argument(call, "shuffle", 2)
    if given is None:
        return with_argument(call, "sampler", sampler)
    other = given.with_changes(
        keyword=cst.Name("sampler"),
        value=sampler,
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    return call.with_changes(args=[other if arg is given else arg for arg in call.args])


def _plain_order(script: Script, call: cst.Call) -> str:
    """Return what ``shuffle`` says of a loader whose sampler does that; "": it has no such."""
    given = keyword(call, "sampler")
    origins = script.origins(given.value) if given is not None else []
    if len(origins) == 1 and isinstance(origins[0], cst.Call) and len(origins[0].args) == 1:
        return _ORDERS.get(script.name(origins[0]), "")
    return ""


def _options(call: cst.Call) -> cst.Arg | None:
    """Return the argument ``**options``; None: there is none."""
    return next((each for each in call.args if each.star == "**"), None)


def _holds_options(script: Script, value: cst.BaseExpression) -> bool:
    """Return whether a name has a dictionary of options of a loader, other than samplers."""
    origins = script.origins(value)
    if not isinstance(value, cst.Name) or not origins:
        return False
    return all(
        isinstance(each, cst.Dict)
        and not {script.code(e.key).strip("\"'") for e in each.elements
                 if isinstance(e, cst.DictElement)} & {"sampler", "batch_sampler", "dataset"}
        for each in origins
    )  # fmt: skip


def _not_shared(script: Script, call: cst.Call) -> str:
    """Return why a loader cannot be given a sampler; "" if it can."""
    inner = (cst.Lambda, cst.BaseComp)
    if script.statement_of(call) is None or any(
        isinstance(each, inner) for each in script.ancestors(call)
    ):
        return "it is made amid an expression; give it a line, and a DistributedSampler"
    options = _options(call)
    if any(arg.star and (arg is not options or not _holds_options(script, arg.value))
           for arg in call.args):  # fmt: skip
        return (
            "what its arguments (*, **) hold cannot be seen. Give it "
            "sampler=DistributedSampler(dataset, ...) in the place of shuffle=True"
        )
    if len([arg for arg in call.args if not arg.keyword]) > 3:
        return "it has more than three arguments without a name; name them"
    for name in ("sampler", "batch_sampler"):
        if keyword(call, name) is not None and not _plain_order(script, call):
            return (
                f"it has a {name} of its own. Let that one draw only this rank's part (as "
                "kolovod.data.ShardedSampler does)"
            )
    dataset = argument(call, "dataset", 0)
    if dataset is None:
        return "its dataset cannot be seen"
    for origin in script.origins(dataset.value):
        if isinstance(origin, cst.Call) and _is_iterable(script, origin):
            return (
                "an IterableDataset takes no sampler. Let it yield only this rank's part, equally "
                "many on all ranks"
            )
    return ""


def _is_iterable(script: Script, call: cst.Call) -> bool:
    """Return whether the call makes an object of an IterableDataset of this script."""
    for each in script.nodes(script.module, cst.ClassDef):
        if each.name.value == script.code(call.func):
            return any(
                script.name(base.value) == "torch.utils.data.IterableDataset" for base in each.bases
            )
    return script.name(call) == "torch.utils.data.IterableDataset"


def _target(script: Script, call: cst.Call) -> str:
    """Return the name to which the call's result is assigned, without what is before a dot."""
    target = script.target_of(call)
    return script.code(target).split(".")[-1] if target is not None else "loader"


def _sampler_name(script: Script) -> str:
    """Return the expression by which the script has the sampler's class, or will have it."""
    calls = script.calls_of(_SAMPLER)
    return script.code(calls[0].func) if calls else "DistributedSampler"


def _start_epochs(
    edits: Edits,
    shared: dict[cst.Call, str],
    epochs: list[tuple[cst.Call, cst.BaseExpression, list[EnclosingLoop]]],
) -> None:
    """Tell the samplers which epoch begins: without that each has the same order."""
    script = edits.script
    done: set[tuple[cst.CSTNode, str]] = set()
    for loader in shared.keys() - {each for each, _, _ in epochs}:
        edits.look(loader, _EPOCHS)
    for loader, name, outer in epochs:
        if loader not in shared or not outer:
            continue  # a single pass over the data
        place = outer[0]
        text = seen_from(script, name, place)
        loop = place.loop
        unnamed = not text and script.inside(loader, loop)
        if (
            not (text or unnamed)
            or not isinstance(loop, cst.For)
            or not isinstance(loop.target, cst.Name | cst.Attribute)
            or not isinstance(loop.body, cst.IndentedBlock)
        ):
            edits.look(loop, _EPOCHS)
            continue
        if (loop, text) in done:
            continue
        done.add((loop, text))
        epoch = script.code(loop.target)
        if epoch == "_":
            epoch = script.unused("epoch")
            edits.replace(loop.target, epoch)
        first = script.statement_of(loader) if unnamed else loop.body.body[0]
        assert isinstance(first, cst.BaseStatement)
        sampler = shared[loader] if unnamed else f"{text}.sampler"
        edits.before(first, f"{sampler}.set_epoch({epoch})")
        edits.why(loop, "another order in each epoch, the same plan on all ranks")

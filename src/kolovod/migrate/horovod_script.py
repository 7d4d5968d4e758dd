"""Scripts for Horovod: they run as they are; or with Kolovod's names where these do the same."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.edits import Edits

__all__ = ["MODULES", "SAME", "rename"]

MODULES = {
    "horovod.torch": "kolovod.torch",
    "horovod.keras": "kolovod.keras",
    "horovod.tensorflow.keras": "kolovod.keras",
    "horovod.tensorflow": "kolovod.tensorflow",
}
_NOTHING: tuple[int, frozenset[str]] = (0, frozenset())
_WORLD = dict.fromkeys(
    ("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size",
     "cross_rank", "cross_size"),
    _NOTHING,
)  # fmt: skip
_VALUES = ("Adasum", "Average", "Compression", "Max", "Min", "Product", "Sum")
_REDUCE = (1, frozenset({"tensor", "name", "op", "prescale_factor", "postscale_factor"}))
_GATHER = (1, frozenset({"tensor", "name"}))
_CAST = (2, frozenset({"tensor", "root_rank", "name"}))
_OBJECTS = {
    "allgather_object": (1, frozenset({"obj", "name"})),
    "broadcast_object": (2, frozenset({"obj", "root_rank", "name"})),
}
SAME: dict[str, dict[str, tuple[int, frozenset[str]]]] = {
    "kolovod.torch": {
        **_WORLD,
        **_OBJECTS,
        "DistributedOptimizer": (
            2,
            frozenset({"optimizer", "named_parameters", "compression", "backward_passes_per_step",
                       "op", "gradient_predivide_factor", "sparse_as_dense"}),
        ),
        "broadcast_parameters": (2, frozenset({"params", "root_rank"})),
        "broadcast_optimizer_state": (2, frozenset({"optimizer", "root_rank"})),
        "allreduce": _REDUCE,
        "allreduce_": _REDUCE,
        "allgather": _GATHER,
        "broadcast": _CAST,
        "broadcast_": _CAST,
        "barrier": _NOTHING,
        "join": _NOTHING,
    },
    "kolovod.keras": {
        **_WORLD,
        "DistributedOptimizer": (
            1,
            frozenset({"optimizer", "compression", "op", "gradient_predivide_factor",
                       "sparse_as_dense"}),
        ),
        "callbacks.BroadcastGlobalVariablesCallback": (1, frozenset({"root_rank"})),
        "callbacks.MetricAverageCallback": _NOTHING,
        "callbacks.LearningRateWarmupCallback": (
            2,
            frozenset({"initial_lr", "warmup_epochs", "momentum_correction", "steps_per_epoch",
                       "verbose"}),
        ),
    },
    "kolovod.tensorflow": {
        **_WORLD,
        **_OBJECTS,
        "DistributedGradientTape": (
            1, frozenset({"compression", "op", "gradient_predivide_factor", "sparse_as_dense"})
        ),
        "DistributedOptimizer": (1, frozenset({"optimizer", "compression", "op"})),
        "broadcast_variables": (2, frozenset({"variables", "root_rank"})),
        "allreduce": _REDUCE,
        "allgather": _GATHER,
    },
}  # fmt: skip
"""By module what means the same there, with as many arguments by place and these by name."""


def rename(edits: Edits) -> None:
    """Import Kolovod's modules in the place of Horovod's, each if all that is used is the same."""
    script = edits.script
    for node in script.nodes(script.module, cst.Import):
        for alias in node.names:
            name = script.code(alias.name)
            if name.split(".")[0] != "horovod":
                continue
            if name not in MODULES or alias.asname is None:
                edits.look(
                    node,
                    f"{name} keeps its name: `import {name} as hvd`, of PyTorch, "
                    "Keras or TensorFlow, is what can be renamed",
                )
                continue
            if _all_the_same(edits, name, script.code(alias.asname.name)):
                edits.replace(alias.name, MODULES[name])
                edits.why(node, "what the script uses of Horovod means the same there")
    for each in script.nodes(script.module, cst.ImportFrom):
        if each.module is not None and script.code(each.module).split(".")[0] == "horovod":
            edits.look(each, "this import keeps its name; it works with the others")


def _all_the_same(edits: Edits, module: str, alias: str) -> bool:
    script = edits.script
    known = SAME[MODULES[module]]
    good = True
    for each in script.nodes(script.module, cst.Name):
        if each.value != alias or script.name(each) != module:
            continue
        whole: cst.CSTNode = each
        while isinstance(script.parent(whole), cst.Attribute):
            whole = script.parent(whole)
        parent = script.parent(whole)
        if isinstance(parent, cst.AsName | cst.ImportAlias):
            continue
        used = script.code(whole).removeprefix(alias).removeprefix(".")
        if used.split(".")[0] in _VALUES:
            continue
        places, names = known.get(used, (-1, frozenset()))
        called = isinstance(parent, cst.Call) and parent.func is whole
        if places < 0 or not called:
            edits.look(whole, f"{alias}.{used} is Horovod's own, so {module} keeps its name")
            good = False
            continue
        assert isinstance(parent, cst.Call)
        other = [arg for arg in parent.args if arg.star or
                 (arg.keyword is not None and arg.keyword.value not in names)]  # fmt: skip
        if other or len([arg for arg in parent.args if arg.keyword is None]) > places:
            edits.look(
                whole,
                f"{alias}.{used} has arguments of Horovod's own here, so {module} keeps its name",
            )
            good = False
    return good

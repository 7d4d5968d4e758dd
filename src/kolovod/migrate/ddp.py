"""DistributedDataParallel: it stays, and Kolovod communicates for torch.distributed."""

from __future__ import annotations

import libcst as cst

from kolovod.migrate.edits import Edits
from kolovod.migrate.script import Script, argument, attribute_call, keyword

__all__ = ["is_distributed", "move", "starts_its_ranks"]

_INIT = "torch.distributed.init_process_group"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_SPAWN = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")


def is_distributed(script: Script) -> bool:
    """Return whether the script communicates by torch.distributed."""
    return bool(script.calls_of(_INIT, _DDP))


def starts_its_ranks(script: Script) -> bool:
    """Return whether the script starts the processes itself."""
    return bool(script.calls_of(*_SPAWN))


def move(edits: Edits) -> bool:
    """Plan the change; return True if the script has it already."""
    script = edits.script
    made = script.calls_of(_INIT)
    if not made:
        edits.need(script.calls_of(_DDP)[0], "DistributedDataParallel is here, but not what makes "
                   'its process group: give that the backend "kolovod"')  # fmt: skip
        return False
    backends = {call: argument(call, "backend", 0) for call in made}
    if all(given and _text(given) == "kolovod" for given in backends.values()):
        return True
    gpu = _on_gpus(script)
    if gpu is not None:
        edits.need(
            gpu,
            "DDP over Kolovod brings what is on GPUs through host memory, and this script uses "
            "GPUs: drop DDP, by the table in docs/from-ddp.md. Nothing is changed",
        )
        return False
    for call, given in backends.items():
        if given is None:
            edits.need(call, 'give it the backend "kolovod"')
        elif _text(given) not in ("gloo", "mpi"):
            edits.need(given, "which backend this is cannot be seen, or it is for GPUs only: make "
                       'it "kolovod" for tensors on CPUs')  # fmt: skip
        else:
            assert isinstance(given.value, cst.SimpleString)  # as _text has found
            quote = given.value.quote
            edits.replace(given.value, f"{quote}kolovod{quote}")
            edits.why(
                given,
                "DDP and all else of torch.distributed stay; Kolovod communicates for "
                "them. docs/from-ddp.md says how to do without DDP",
            )
    if spawn := script.calls_of(*_SPAWN):
        edits.look(
            spawn[0],
            "the script starts its ranks itself, on this host: `kolovod run` can "
            "do that instead, on several hosts too; each rank is then the whole script",
        )
    return False


def _text(given: cst.Arg) -> str:
    """Return a constant's text; "" for anything else."""
    value = given.value
    found = value.evaluated_value if isinstance(value, cst.SimpleString) else ""
    return found if isinstance(found, str) else ""


def _on_gpus(script: Script) -> cst.CSTNode | None:
    """Return the node that puts something on a GPU, whatever the host has; None without any."""
    for call in script.calls:
        if attribute_call(call, "cuda") is not None and not script.name(call):
            return call
        if script.name(call) == "torch.cuda.set_device" or keyword(call, "device_ids"):
            given = keyword(call, "device_ids")
            if given is None or script.code(given.value) != "None":
                return call
    for each in script.nodes(script.module, cst.SimpleString):
        if each.raw_value in ("cuda", "cuda:0", "nccl"):
            return each
    return None

"""Models and optimizers in the state of an elastic job of which each rank has another part.

A lost rank's part of FSDP's parameters, or of ZeRO's optimizer, is on no other rank, and a rank
that joins could be given no part of its own. So where the ranks change the job ends, on each rank
with an error that says who was lost, of what, and how to go on. Jobs of replicas go on
(``replicas``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from kolovod.core.transaction import transaction
from kolovod.core.world import World, current
from kolovod.elastic import share_by
from kolovod.elastic.each_world import in_each_world
from kolovod.elastic.state import run_within
from kolovod.errors import CollectiveAbortedError, JobOverError

__all__ = ["kind_of", "made_in", "register"]

_WAY_OUT = (
    "Start it again from a checkpoint (torch.distributed.checkpoint); or train by "
    "DistributedDataParallel, which goes on without the ranks that are lost, or shard the model "
    "over the ranks of a replica (kolovod run --replica-size)"
)

_in_use: dict[str, tuple[str, World]] = {}  # by name: how it is sharded, over which ranks
_made_in: World | None = None


def register() -> None:
    """Let ``kolovod.elastic.run`` know shards among the values of its state."""
    share_by(_is_sharded, share_shards)
    run_within(_is_sharded, _within)
    in_each_world(_check_ranks)


def made_in(world: World) -> None:
    """Note the ``world`` in which what is sharded outside ``run`` was made: where ranks meet."""
    global _made_in
    _made_in = world


def share_shards(name: str, value: Any) -> Any:
    """Let each rank keep its part. Raises JobOverError, on all, if one has come that has none."""
    if transaction().lacking:
        how = kind_of(value) or "sharded"
        raise JobOverError(
            f"{name!r} of the state is {how}: a rank that joins the others could be given no part "
            f"of it, so this job ends when its ranks change. {_WAY_OUT}"
        )
    return value


@contextlib.contextmanager
def _within(name: str, value: Any) -> Iterator[None]:
    _in_use[name] = kind_of(value) or "sharded", _made_in or current()
    try:
        _check_ranks()  # one may have been lost before this rank came here
        yield
    except CollectiveAbortedError as error:
        # The next world has those who are left, and ends by _check_ranks.
        transaction().recover(error)
        raise JobOverError(_text(name, *_in_use[name], str(error))) from error
    finally:
        del _in_use[name]


def _check_ranks() -> None:
    """Raise JobOverError, in each world, unless all ranks are here that had a part."""
    for name, (how, before) in _in_use.items():
        gone = [rank for rank, n in enumerate(before.members) if n not in current().members]
        if gone:
            who = ", ".join(f"rank {rank} on host {before.hosts[rank]}" for rank in gone)
            verb = "are" if len(gone) > 1 else "is"
            raise JobOverError(_text(name, how, before, f"{who} {verb} not in the job any more"))


def _text(name: str, how: str, world: World, why: str) -> str:
    return (
        f"{why}. {name!r} of the state is {how} over {world.size} ranks, each of which needs the "
        f"parts of the others, so the job cannot go on. {_WAY_OUT}"
    )


def _is_sharded(value: Any) -> bool:
    return kind_of(value) is not None


def kind_of(value: Any) -> str | None:
    """Return, in words, how ``value`` is sharded; None: it is not."""
    if isinstance(value, torch.nn.Module):
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        if any(isinstance(module, fsdp) for module in value.modules()):
            return "sharded by FSDP"
        return "sharded by FSDP2 (DTensor)" if any(map(_is_part, value.parameters())) else None
    if isinstance(value, torch.optim.Optimizer):
        zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
        if isinstance(value, zero):
            return "sharded by ZeroRedundancyOptimizer"
        tensors = [tensor for group in value.param_groups for tensor in group["params"]]
        if any(map(_is_part, tensors)):
            return "the optimizer of a model that FSDP has sharded"
    return None


def _is_part(tensor: torch.Tensor) -> bool:
    """Return whether it is a part of a parameter: a DTensor's, or one of FSDP's first version."""
    placements = getattr(tensor, "placements", ())
    flattened = (
        getattr(tensor, "_fsdp_flattened", False) or type(tensor).__name__ == "FlatParameter"
    )
    return flattened or any(placement.is_shard() for placement in placements)

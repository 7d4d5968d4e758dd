"""Models of which each replica of several ranks has a whole one, sharded by ``fully_shard``.

In a job of ``kolovod run --elastic --replica-size N`` the ranks of a replica come and go together.
The default group of ``torch.distributed`` is that of the replica: it meets when its processes
start, and it does not end when the job's world does, so a forward or backward that is under way
when another replica is lost comes to its end. What replicas exchange (gradients, tickets) goes
through Kolovod; who joins is given each part of the state by a rank that has the same part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from kolovod import lifecycle
from kolovod.c10d.shards import kind_of
from kolovod.c10d.stores import store_of_replica
from kolovod.elastic import share_by
from kolovod.elastic.replicas import own_part
from kolovod.errors import GroupArgumentError
from kolovod.rendezvous.rank_environment import RankEnvironment
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.functions import Functions
from kolovod.torch.parts import local_of, meshes
from kolovod.torch.verbs import collectives

__all__ = ["begin"]

_is_registered = False


def begin(
    original: Callable[..., Any], given: dict[str, Any], environment: RankEnvironment
) -> None:
    """Make the default group, of this replica, by ``original``.

    ``given``: the script's arguments, but those that say where this process is. All ranks of the
    world call this. Raises InvalidArgumentError for a backend that cannot outlive a world, and as
    ``store_of_replica``.
    """
    global _is_registered
    if str(given.get("backend")).lower() == "kolovod":
        raise GroupArgumentError(
            'init_process_group("kolovod") in a job of replicas, whose groups go on when a world '
            'ends: give "nccl" or "gloo" for what a replica does within itself'
        )
    assert environment.process is not None
    lifecycle.init()
    index, size = environment.replica.index(environment.process), len(environment.replica)
    store = store_of_replica(environment.slot // size, index, given.get("timeout"))
    original(**given, store=store, rank=index, world_size=size)
    if not _is_registered:
        _is_registered = True
        share_by(_is_sharded, share_part)
        share_by(_is_ddp, _refuse_ddp)


def share_part(name: str, value: Any) -> Any:
    """Give this rank's part to those that have the same one in other replicas, and lack it.

    Raises InvalidArgumentError for shards that are not those of a replica.
    """
    _check(name, value)
    functions = Functions(TorchCollectives(collectives.frontend, own_part().membership))
    if isinstance(value, torch.nn.Module):
        tensors = value.state_dict().items()
        functions.broadcast_parameters([(f"{name}.{key}", local_of(t)) for key, t in tensors])
    else:
        functions.broadcast_optimizer_state(value)
    return value


def _check(name: str, value: Any) -> None:
    """Raise InvalidArgumentError for shards that are not those of a replica."""
    kind, size = kind_of(value) or "not sharded", torch.distributed.get_world_size()
    sizes = {mesh.size() for mesh in meshes(value)}
    if sizes != {size}:
        over = f"over meshes of {sorted(sizes)} ranks" if sizes else "over no mesh"
        raise GroupArgumentError(
            f"{name!r} of the state is {kind}, {over}: in a job of replicas use "
            f"torch.distributed.fsdp.fully_shard over the {size} ranks of the default group, so "
            "that the ranks of a replica have a whole model together"
        )


def _refuse_ddp(name: str, value: Any) -> Any:
    """Raise InvalidArgumentError: nothing would average its gradients among the replicas."""
    size = torch.distributed.get_world_size()
    raise GroupArgumentError(
        f"{name!r} of the state is wrapped by DistributedDataParallel, whose group here is this "
        f"replica of {size} ranks: replicas would train apart. Shard the model by "
        "torch.distributed.fsdp.fully_shard, or run the job without --replica-size"
    )


def _is_ddp(value: Any) -> bool:
    return isinstance(value, DistributedDataParallel)


def _is_sharded(value: Any) -> bool:
    return kind_of(value) is not None

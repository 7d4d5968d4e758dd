"""Shards in an elastic job: where the ranks change each of them raises one error, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_torch_ranks as run_ranks
from launched import KOLOVOD
from survivors import NoLoss, Survivors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import kolovod.torch as kv
from kolovod import elastic
from kolovod.c10d import shards
from kolovod.core.transaction import use_transaction
from kolovod.core.world import current
from kolovod.elastic.each_world import then_in_each_world
from kolovod.elastic.steps import Steps
from kolovod.errors import JobOverError

VICTIM = 1
KINDS = {
    "fsdp2": (3, "sharded by FSDP2", ["model", "optimizer"]),
    "hsdp": (4, "sharded by FSDP2", ["model", "optimizer"]),
    "fsdp": (3, "sharded by FSDP", ["model", "optimizer"]),
    "zero": (3, "sharded by ZeroRedundancyOptimizer", ["optimizer"]),
    "ddp": (3, "", []),
}


def state_of(kind: str) -> elastic.State:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8))
    make: Any = torch.optim.SGD
    if kind in ("fsdp2", "hsdp"):
        names = ("replicate", "shard") if kind == "hsdp" else ("shard",)
        shape = (2, 2) if kind == "hsdp" else (dist.get_world_size(),)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    elif kind == "fsdp":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind == "zero":
        return elastic.State(
            model=model, optimizer=ZeroRedundancyOptimizer(model.parameters(), make, lr=0.1)
        )
    return elastic.State(model=model, optimizer=make(model.parameters(), 0.1))


def begin(path: str) -> None:
    kv.init()
    store = dist.FileStore(path, kv.size())
    dist.init_process_group("kolovod", store=store, rank=kv.rank(), world_size=kv.size())
    shards.register()


def lose_one(rank: int, kind: str, path: str) -> str:
    """One rank is killed between two steps; what the others' training raises."""
    begin(path)
    recovery = Survivors([r for r in range(kv.size()) if r != VICTIM])
    use_transaction(Steps(recovery, current, entered=then_in_each_world(lambda: None)))
    state = state_of(kind)
    try:
        with state.in_use():
            for step in range(6):
                if rank == VICTIM and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                state.optimizer.zero_grad()
                state.model(torch.ones(2, 8)).sum().backward()
                state.optimizer.step()
    except JobOverError as error:
        return str(error)
    raise AssertionError("the training has come to its end without a rank that it needs")


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp", "fsdp", "zero"])
def test_a_lost_rank_is_named_with_the_way_out(kind: str, tmp_path: Path) -> None:
    size, how, names = KINDS[kind]
    errors = run_ranks(size, lose_one, kind, str(tmp_path / "store"), keep_going=True)
    del errors[VICTIM]
    for error in errors:
        assert error == errors[0]
        assert error.startswith(f"rank {VICTIM} on host "), error
        assert any(f"'{name}' of the state is " in error for name in names), error
        assert f"{how}" in error or "FSDP has sharded" in error, error
        assert f"over {size} ranks" in error
        assert "from a checkpoint" in error


class Joins(NoLoss):
    """A process that has come without the state."""

    def __init__(self, *, has_state: bool) -> None:
        self.has_state = has_state


def join(rank: int, kind: str, path: str) -> list[str]:
    """The last rank has come later, and the others give it what is in the state."""
    begin(path)
    joins = Joins(has_state=rank != kv.size() - 1)
    ongoing = Steps(joins, current, entered=then_in_each_world(lambda: None))
    use_transaction(ongoing)
    state = state_of(kind)
    ongoing.begin()
    try:
        state.sync()
    except JobOverError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("kind", ["fsdp2", "zero", "ddp"])
def test_a_rank_that_joins_ends_the_job_on_all(kind: str, tmp_path: Path) -> None:
    """But with DDP, where it gets all of the state."""
    size, how, names = KINDS[kind]
    for errors in run_ranks(size, join, kind, str(tmp_path / "store")):
        assert len(errors) == bool(names)
        for error in errors:
            assert f"'{names[0]}' of the state is {how}" in error
            assert "from a checkpoint" in error


def begin_alike(rank: int, path: str) -> list[bool]:
    """As the job begins each rank keeps its part, and is not given rank 0's."""
    begin(path)
    ongoing = Steps(Joins(has_state=True), current)
    use_transaction(ongoing)
    state = state_of("fsdp2")
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.to_local().fill_(float(rank))
    ongoing.begin()
    state.sync()
    return [bool((p.to_local() == rank).all()) for p in state.model.parameters()]


def test_a_job_begins_with_the_parts_that_ranks_have(tmp_path: Path) -> None:
    for kept in run_ranks(3, begin_alike, str(tmp_path / "store")):
        assert all(kept)


JOB = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from kolovod import elastic

def die():
    print("killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

is_victim = os.environ["KOLOVOD_SLOT"] == "1"
dist.init_process_group("kolovod")
model = torch.nn.Linear(8, 8)
fully_shard(model)
state = elastic.State(model=model, step=0)
if is_victim and sys.argv[1] == "before run":
    die()

@elastic.run
def train(state):
    while True:
        if is_victim and state.step == 3:
            die()
        model(torch.ones(2, 8)).sum().backward()
        state.step += 1
        state.commit()

train(state)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before run", "in a step"])
def test_a_whole_job_ends_soon(when: str) -> None:
    """Its launcher starts the lost rank's slot again, but to no purpose."""
    command = [*KOLOVOD, "run", "--elastic", "-np", "3", "--", sys.executable, "-c", JOB, when]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "killed" in process.stdout.readline()
        _, err = process.communicate(timeout=100)  # its own limit is ten minutes
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, err
    for slot in (0, 2):
        mine = "\n".join(line for line in err.splitlines() if line.startswith(f"[{slot}]"))
        assert "JobOverError: rank 1 on host localhost is not in the job any more" in mine, err

"""Jobs of replicas: one that loses a rank goes as a whole, and comes again; no step is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_torch_ranks as run_ranks
from launched import KOLOVOD
from replica_script import share
from slow import thorough_but

import kolovod.torch as kv
from kolovod.errors import InvalidArgumentError

SCRIPT = Path(__file__).parents[1] / "support" / "replica_script.py"
RANKS, SIZE = 4, 2
pytestmark = pytest.mark.timeout(150)


def job(how: str, victim: int) -> tuple[list[dict[str, Any]], subprocess.CompletedProcess[str]]:
    """What the processes have printed, and the launcher."""
    flags = ["--elastic", "-np", str(RANKS), "--replica-size", str(SIZE)]
    done = subprocess.run(
        [*KOLOVOD, "run", *flags, "--", sys.executable, str(SCRIPT), how, str(victim)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    return [json.loads(line) for line in lines], done


def check(lines: list[dict[str, Any]], ranks: int) -> list[list[int]]:
    """All have the same steps, and the values that follow from who took part; who did, by step."""
    ended = [line for line in lines if "members" in line]
    assert len(ended) == ranks
    assert len({json.dumps([line["members"], line["found"]]) for line in ended}) == 1
    by_part = {part: {e["values"] for e in ended if e["part"] == part} for part in range(SIZE)}
    assert [len(values) for values in by_part.values()] == [1] * SIZE  # all replicas' are the same
    known = 0.0
    members: list[list[int]] = ended[0]["members"]
    for step, (numbers, found) in enumerate(zip(members, ended[0]["found"], strict=True)):
        known -= sum(share(number, step) for number in numbers) / SIZE
        assert found == known, f"after step {step} of {numbers}"
    return members


@pytest.mark.slow
def test_a_replica_is_lost_and_comes_again() -> None:
    lose("forward", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    thorough_but(
        [("backward", 0), ("later", 1)],
        [("backward", 0), *(("later", victim) for victim in range(RANKS))],
    ),
)
def test_whenever_it_is_lost(case: tuple[str, int]) -> None:
    lose(*case)


def lose(how: str, victim: int) -> None:
    lines, done = job(how, victim)
    members = check(lines, RANKS)
    gone = {victim, victim ^ 1}
    assert members[0] == [0, 1, 2, 3]
    assert [0, 1, 2, 3] not in members[-3:]
    assert len(members[-1]) == RANKS
    assert gone.isdisjoint(members[-1])
    assert sorted(set(range(RANKS)) - gone) in members
    assert f"slot {victim ^ 1} on host localhost ends with its replica" in done.stderr
    assert all(len(each) % SIZE == 0 for each in members)
    assert f"epoch 2: 2 ranks go on, since rank {victim} on host localhost was lost" in done.stderr


@pytest.mark.slow
def test_a_replica_leaves_as_a_whole() -> None:
    lines, done = job("asked", 2)
    members = check(lines, SIZE)
    assert members[-1] == [0, 1]
    assert sorted(line["left"] for line in lines if "left" in line) == [2, 3]
    assert "failed" not in done.stderr


WRAPPED = """
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from kolovod import elastic

dist.init_process_group("gloo")
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
else:
    model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))


@elastic.run
def train(state):
    print("trains", flush=True)


train(elastic.State(model=model))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ddp", "wrapped by DistributedDataParallel, whose group here is this replica of 2 ranks"),
        ("fsdp", "use torch.distributed.fsdp.fully_shard over the 2 ranks"),
    ],
)
def test_other_wrappers_are_refused(kind: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "wrapped.py"
    script.write_text(WRAPPED)
    flags = ["--elastic", "-np", "2", "--replica-size", "2"]
    done = subprocess.run(
        [*KOLOVOD, "run", *flags, "--", sys.executable, str(script), kind],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert said in done.stderr
    assert "trains" not in done.stdout


def refused(rank: int) -> None:
    """Shards in a job that is not of replicas, and what cannot be averaged among parts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kv.init()
    store = dist.HashStore()
    dist.init_process_group("kolovod", store=store, rank=0, world_size=1)
    model: Any = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    plain = torch.nn.Linear(2, 2)
    alone = kv.ProcessSet([0])
    with pytest.raises(InvalidArgumentError, match=r"each rank has other parts.*--replica-size"):
        kv.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    mixed = torch.optim.SGD([*model.parameters(), *plain.parameters()], 0.1)
    with pytest.raises(InvalidArgumentError, match="2 that are not"):
        kv.DistributedOptimizer(mixed, process_set=alone)
    with pytest.raises(InvalidArgumentError, match="op is Average or Sum"):
        kv.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), op=kv.Adasum, process_set=alone
        )
    for verb in (kv.allreduce, kv.allgather, lambda t: kv.broadcast_parameters([("w", t)])):
        with pytest.raises(InvalidArgumentError, match=r"DTensor.*to_local\(\)"):
            verb(model.weight.detach())
    dist.destroy_process_group()


def test_shards_of_other_jobs_are_refused() -> None:
    run_ranks(1, refused)

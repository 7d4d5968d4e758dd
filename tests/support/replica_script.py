"""A script of a job of replicas: a model sharded by ``fully_shard`` among two ranks each.

    replica_script.py HOW VICTIM

The first process in slot VICTIM dies in step DEATH: HOW is "forward", "backward" or "later"; or it
asks to leave, "asked". The job ends when all have been there again for some steps, or some steps
after a leave. Each row of ``known`` has the same gradient on a rank, which follows from the
member's number and the step; so what it is after each step is known. Each rank prints a line of
JSON at the end.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from survivors import kill_soon
from torch.distributed.fsdp import fully_shard

import kolovod.torch as kv
from kolovod import elastic
from kolovod.core.transaction import transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps

DEATH, AFTER, MOST = 4, 3, 3000
SIZES = (8, 300, 300, 8)


def share(number: int, step: int) -> float:
    """Of a member's gradient."""
    return float((number % 11 + 1) * (step + 1))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        pairs = itertools.pairwise(SIZES)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self.known = torch.nn.Parameter(torch.zeros(6))

    def forward(self, rows: torch.Tensor, own: float) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows).tanh()
        return rows.square().mean() + own * self.known.sum()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(how: str, victim: int) -> None:
    kv.init()
    dist.init_process_group("gloo")
    model: Any = Net().double()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    known = kv.DistributedOptimizer(torch.optim.SGD([model.known], 1.0), op=kv.Sum)
    layers = kv.DistributedOptimizer(
        torch.optim.AdamW(model.layers.parameters(), 1e-3),
        named_parameters=model.named_parameters(),
    )
    state = elastic.State(model=model, known=known, layers=layers, members=[], found=[])
    is_victim = os.environ["KOLOVOD_SLOT"] == os.environ["KOLOVOD_PROCESS"] == str(victim)

    @state.on_leave
    def left(rank: int) -> None:
        print(json.dumps({"left": int(os.environ["KOLOVOD_SLOT"]), "rank": rank}), flush=True)

    def strike() -> None:
        if how == "forward":
            model.layers[1].register_forward_hook(die)
        elif how == "backward":
            model.layers[1].weight.register_post_accumulate_grad_hook(die)
        elif how == "later":
            kill_soon(Random(victim).uniform(0, 0.03))
        else:
            signal.raise_signal(signal.SIGTERM)

    @elastic.run
    def train(state: Any) -> None:
        number = current().members[current().rank]
        while not is_over(state.members, how) and len(state.members) < MOST:
            step = len(state.members)
            if is_victim and step == DEATH:
                strike()
            rows = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(step + number))
            model.zero_grad()
            model(rows.double(), share(number, step)).backward()
            torch.nn.utils.clip_grad_norm_(model.layers.parameters(), 1.0)
            layers.step()
            known.step()
            ongoing = transaction()
            assert isinstance(ongoing, Steps)
            assert ongoing.counted is not None
            state.members.append(list(ongoing.counted))
            state.found.append(model.known.to_local().tolist()[0])
            state.commit()

    train(state)
    values = [p.detach().to_local().contiguous().numpy().tobytes() for p in model.parameters()]
    values += [
        each[key].to_local().numpy().tobytes()
        for each in layers.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    print(
        json.dumps(
            {
                "part": dist.get_rank(),
                "members": state.members,
                "found": state.found,
                "values": hashlib.sha256(b"".join(values)).hexdigest(),
            }
        ),
        flush=True,
    )


def is_over(members: list[list[int]], how: str) -> bool:
    """Whether all were there for some steps, then fewer, then all again."""
    sizes = [len(each) for each in members]
    fewer = min(sizes, default=0) < max(sizes, default=0)
    if how == "asked":
        return fewer and sizes[-AFTER:] == [min(sizes)] * AFTER
    return fewer and sizes[-AFTER:] == [max(sizes)] * AFTER


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

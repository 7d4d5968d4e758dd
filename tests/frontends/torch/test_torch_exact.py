"""An optimizer in an elastic job: a step that a death interrupts is repeated, and nothing else.

Here ranks are processes that are killed at any time; at each point of a step, with all options:
tests/elastic/test_step_table.py.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from typing import Any

import pytest
import torch
from compressors import ByTurns
from dying import die
from forked import run_torch_ranks as run_ranks
from survivors import Survivors, kill_soon

import kolovod.torch as kv
from kolovod.core.transaction import transaction, use_transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps

RANKS = 3
STEPS = 12
KINDS = {
    "plain": {},
    "passes": {"backward_passes_per_step": 2},
    "sum": {"op": kv.Sum},
    "bf16": {"compression": kv.Compression.bf16},
    "groups": {"groups": 2},
    "a state": {},  # of a compressor
}


def model_of() -> torch.nn.Module:
    """Gradients of many sizes, so that there are several buckets."""
    torch.manual_seed(1)
    sizes = [8, 700, 700, 8]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*layers)


def batch_of(rank: int, step: int, part: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def parts_of(kind: str) -> int:
    return int(KINDS[kind].get("backward_passes_per_step", 1))


def gradients(model: torch.nn.Module, rank: int, step: int, parts: int) -> None:
    for part in range(parts):
        model(batch_of(rank, step, part)).square().mean().backward()


def train(rank: int, kind: str, victim: int, seed: int) -> Any:
    alive = [r for r in range(RANKS) if r != victim]
    kv.init()
    use_transaction(Steps(Survivors(alive), current))
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    named = model.named_parameters()
    options = {"compression": ByTurns()} if kind == "a state" else KINDS[kind]
    optimizer = kv.DistributedOptimizer(optimizer, named, **options)
    log, losses = [], []
    ongoing = transaction()
    assert isinstance(ongoing, Steps)
    step = 0
    while step < STEPS or victim in log[-1]:  # all take the same steps, until it is killed
        if rank == victim and step == STEPS // 3:
            kill_soon(random.Random(seed).uniform(0, 0.03))
        optimizer.zero_grad()
        gradients(model, rank, step, parts_of(kind))
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.append(ongoing.counted)
        step += 1
        losses.append(sum(float(p.detach().double().sum()) for p in model.parameters()))
    return log, losses, [p.detach().numpy().tobytes() for p in model.parameters()]


def replay(log: list[tuple[int, ...]], kind: str) -> list[float]:
    """The same in one process, from all members' gradients."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step, members in enumerate(log):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in members:
            optimizer.zero_grad()
            gradients(model, rank, step, parts_of(kind))
            for value, parameter in zip(total, model.parameters(), strict=True):
                value += parameter.grad
        for value, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = value if kind == "sum" else value / len(members)
            if kind == "a state":
                parameter.grad *= step % 3 + 1
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(sum(float(p.detach().double().sum()) for p in model.parameters()))
    return losses


def check(kind: str, victim: int, seed: int) -> None:
    results = run_ranks(RANKS, train, kind, victim, seed, keep_going=True)
    survivors = [results[rank] for rank in range(RANKS) if rank != victim]
    assert survivors[0] == survivors[1]
    log, losses, _ = survivors[0]
    assert log[0] == tuple(range(RANKS))
    assert log[-1] == tuple(rank for rank in range(RANKS) if rank != victim)
    tolerance = 3e-2 if kind == "bf16" else 1e-3
    torch.testing.assert_close(losses, replay(log, kind), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_survivors_go_on_with_the_same_step() -> None:
    check("plain", 0, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whenever_the_kill_comes(seed: int) -> None:
    check(list(KINDS)[seed % len(KINDS)], seed % RANKS, seed)


def adasum(rank: int) -> Any:
    """Of four ranks two are killed, so that the others' steps go on being combined."""
    kv.init()
    use_transaction(Steps(Survivors([1, 2]), current))
    weight = torch.nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([weight], 1.0)
    optimizer = kv.DistributedOptimizer(sgd, [("w", weight)], op=kv.Adasum)
    for step in range(6):
        if rank in (0, 3) and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        weight[rank].backward()  # steps at right angles are added up
        optimizer.step()
    return weight.tolist()


def test_steps_that_are_combined_by_adasum() -> None:
    _, first, second, _ = run_ranks(4, adasum, keep_going=True)
    assert first == second
    # Where only the killed ones had passed the third step's ticket, the others repeat that step.
    assert first in ([-3.0, -6.0, -6.0, -3.0], [-2.0, -6.0, -6.0, -2.0])


def alone(rank: int, after_backward: bool) -> list[float]:
    """The other rank is lost, and nobody is left to send gradients to."""
    kv.init()
    use_transaction(Steps(Survivors([0]), current))
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = kv.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("w", weight)])
    values = []
    for step in range(6):
        optimizer.zero_grad()
        if step == 2 and not after_backward:
            die(rank, 1)
        (weight.sum() * (rank + 1)).backward()
        if step == 2 and after_backward:
            die(rank, 1)
        optimizer.step()
        values.append(float(weight[0]))
    assert kv.size() == 1
    return values


@pytest.mark.parametrize("after_backward", [False, True])
def test_the_last_rank_goes_on_alone(after_backward: bool) -> None:
    """By its own gradient; that of a backward which both have come through counts, too."""
    (values, _) = run_ranks(2, alone, after_backward, keep_going=True)
    both = 3 if after_backward else 2
    wanted = [-1.5 * (step + 1) for step in range(both)]
    wanted += [wanted[-1] - 1.0 - more for more in range(6 - both)]
    assert values == wanted

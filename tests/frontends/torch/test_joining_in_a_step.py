"""``run(join="during_step")``: a rank is given the state in a step, whoever is lost meanwhile."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from typing import Any

import pytest
import torch
from forked import run_torch_ranks as run_ranks
from survivors import Survivors, kill_soon

import kolovod
import kolovod.torch as kv
from kolovod.core.transaction import transaction, use_transaction
from kolovod.core.world import current
from kolovod.elastic import State, running
from kolovod.elastic.steps import Steps

BEFORE, STEPS = 2, 5
WIDTH = 1500


def model_of(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    first = torch.nn.Linear(8, WIDTH, bias=False)
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two moments; small gradients are not blown up, whose last bits depend on the order."""
    return torch.optim.AdamW(model.parameters(), 0.01, eps=0.1)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: torch.nn.Module, rank: int, step: int) -> None:
    model(batch_of(rank, step)).square().mean().backward()


class Joining(Survivors):
    """Of a rank that comes to the others, or of one of these."""

    def __init__(self, alive: list[int], has_state: bool) -> None:
        super().__init__(alive)
        self.has_state = has_state

    def got_state(self) -> None:
        self.has_state = True


def train(rank: int, victim: int, delay_s: float, is_late: bool, is_torn: bool = False) -> Any:
    """Ranks 0 and 1 take two steps; then 2 comes, and in the third one ``victim`` is killed.

    ``delay_s``: after so long; 0: before it gives, or takes, the last of the state. ``is_torn``:
    other bytes come than were sent.
    """
    model = model_of(rank)
    optimizer = optimizer_of(model)
    kolovod.init(comm=[0, 1] if rank < 2 else [2])
    optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
    state: Any = State(model=model, optimizer=optimizer, step=0, log=[])
    if rank < 2:
        state.sync()
        for _ in range(BEFORE):
            step_of(state, rank)
    kolovod.shutdown()
    kolovod.init(comm=[0, 1, 2])
    client: Any = Joining([r for r in range(3) if r != victim], has_state=rank < 2)
    ongoing = Steps(client, current)
    use_transaction(ongoing)
    ongoing.begin()
    handing_over: Any = running._share(
        state, ongoing, client, also=rank == 2, during_step=is_late and rank < 2
    )
    assert (handing_over is not None) == is_late
    running._hand_over(ongoing, handing_over)
    if rank == victim and delay_s:
        kill_soon(delay_s)
    elif is_torn and rank == 2:
        handing_over._portions[0].checksum = lambda piece: 0
    elif rank == victim:  # where the others wait for what it sends, or for it in the exchange
        handing_over.deliver = partial(os.kill, os.getpid(), signal.SIGKILL)
    # All take the same steps, until it is killed.
    while state.step < STEPS or victim in state.log[-1]:
        step_of(state, rank)
        assert client.has_state
        if state.step == BEFORE + 1:
            ongoing.commit()
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    bits = [p.detach().numpy().tobytes() for p in model.parameters()]
    exact = [t.numpy().tobytes() for s in optimizer.state.values() for t in s.values()]
    return state.log, sums, (bits, exact), int(model[1].num_batches_tracked)


def step_of(state: Any, rank: int) -> None:
    state.optimizer.zero_grad()
    gradients(state.model, rank, state.step)
    state.optimizer.step()
    ongoing = transaction()
    weightless = getattr(ongoing, "weightless", frozenset())
    state.log = [*state.log, sorted(set(current().members) - weightless)]
    state.step += 1


def replay(log: list[list[int]]) -> list[float]:
    """The same in one process."""
    model = model_of(0)
    optimizer = optimizer_of(model)
    for step, members in enumerate(log):
        optimizer.zero_grad()
        for rank in members:
            gradients(model, rank, step)
        for parameter in model.parameters():
            parameter.grad /= len(members)
        optimizer.step()
    return [float(p.detach().double().sum()) for p in model.parameters()]


def check(victim: int, delay_s: float = 0.0, is_late: bool = True) -> list[list[int]]:
    results = run_ranks(3, train, victim, delay_s, is_late, keep_going=True)
    left = [result for rank, result in enumerate(results) if rank != victim]
    assert all(result[:3] == left[0][:3] for result in left)
    log, sums, *_ = left[0]
    assert log[:BEFORE] == [[0, 1]] * BEFORE
    assert len(log) >= STEPS
    assert log[-1] == [rank for rank in range(3) if rank != victim]
    if is_late:
        assert 2 not in log[BEFORE]
    torch.testing.assert_close(sums, replay(log), rtol=1e-3, atol=1e-3)
    # What a forward with parameters of its own has made of the joiner's statistics is gone.
    assert len({result[3] for result in left}) == 1 + (is_late and victim != 2)
    return log


@pytest.mark.parametrize("is_late", [True, False], ids=["in the step", "before it"])
def test_nobody_is_lost(is_late: bool) -> None:
    check(-1, is_late=is_late)


@pytest.mark.parametrize("victim", range(3), ids=["the first", "a giver", "who joins"])
def test_a_rank_is_lost(victim: int) -> None:
    log = check(victim)
    assert victim not in log[BEFORE], "it was not in the middle of the step"


def test_what_comes_is_what_was_sent() -> None:
    *left, torn = run_ranks(3, train, 2, 0.0, True, True, keep_going=True)
    assert "piece 0 of the state has come from rank" in str(torn)
    assert left[0][:3] == left[1][:3]
    assert left[0][0] == [[0, 1]] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_whenever_it_is_lost(seed: int) -> None:
    check(seed % 3, random.Random(seed).uniform(0, 0.15))

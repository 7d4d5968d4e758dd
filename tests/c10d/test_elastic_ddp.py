"""DDP in an elastic job: forward, backward and the time between them may each lose a rank.

Whole jobs, in which others come in the places of the lost: tests/elastic/test_jobs.py.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_torch_ranks as run_ranks
from survivors import NoLoss, Survivors, kill_soon
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import kolovod.torch as kv
from kolovod.c10d.data_parallel import DataParallel
from kolovod.core.transaction import transaction, use_transaction
from kolovod.core.world import current
from kolovod.elastic.steps import Steps
from kolovod.errors import InvalidArgumentError

RANKS, STEPS, DEATH = 3, 10, 4


class Net(torch.nn.Module):
    """Gradients of several buckets; in odd steps the first layer is not used."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        pairs = itertools.pairwise([8, 600, 600, 8])
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self.norm = torch.nn.BatchNorm1d(600)
        self.extra = torch.nn.Linear(8, 8)
        self.checkpoints = checkpoints

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        if step % 2 == 0:
            rows = self.extra(rows)
        first, *others = self.layers
        rows = self.norm(first(rows))
        for layer in others:
            rows = checkpoint(layer, rows, use_reentrant=True) if self.checkpoints else layer(rows)
        return rows


def batch_of(rank: int, step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def begin(alive: list[int], model: torch.nn.Module, **options: Any) -> Any:
    """Be a rank of an elastic job, of whose ranks those in ``alive`` will be left; a DDP."""
    kv.init()
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("kolovod", store=store, rank=kv.rank(), world_size=kv.size())
    recovery = NoLoss() if len(alive) == kv.size() else Survivors(alive)
    use_transaction(Steps(recovery, current))
    return DDP(model, **options)


def in_forward(model: Any) -> None:
    """Die in the next forward."""
    model.norm.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def in_backward(model: Any) -> None:
    """Die in the next backward, when some buckets are on their way."""
    middle = model.layers[1].weight
    middle.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def between_steps(model: Any) -> None:
    """Die when the next backward is over."""
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, Callable[[Any], None]] = {
    "forward": in_forward,
    "backward": in_backward,
    "between steps": between_steps,
}


def train(rank: int, victim: int, how: str, seed: int) -> Any:
    net = Net()
    model = begin([r for r in range(RANKS) if r != victim], net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    log, buffers_of, sums = [], [], []
    ongoing = transaction()
    assert isinstance(ongoing, Steps)
    with DataParallel("model", model).in_use():
        # All take the same steps, until it is killed.
        while len(log) < STEPS or victim in log[-1]:
            step = len(log)
            if rank == victim and step == DEATH:
                if how == "any time":
                    kill_soon(random.Random(seed).uniform(0, 0.03))
                else:
                    DEATHS[how](net)
            optimizer.zero_grad()
            model(batch_of(rank, step), step).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            log.append(ongoing.counted)
            buffers_of.append(ongoing.world.members[0])  # one may die between gradients and buffers
            sums.append([float(t.detach().double().sum()) for t in net.state_dict().values()])
    return log, buffers_of, sums, [t.detach().numpy().tobytes() for t in net.state_dict().values()]


def replayed(log: list[tuple[int, ...]], buffers_of: list[int]) -> list[list[float]]:
    """The same in one process, with the gradients of all members, and one's buffers."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    sums = []
    for step, members in enumerate(log):
        total: list[Any] = [None for _ in net.parameters()]
        before = [buffer.clone() for buffer in net.buffers()]
        kept = None
        for rank in members:
            for buffer, value in zip(net.buffers(), before, strict=True):
                buffer.copy_(value)
            optimizer.zero_grad()
            net(batch_of(rank, step), step).square().mean().backward()
            if rank == buffers_of[step]:
                kept = [buffer.clone() for buffer in net.buffers()]
            for i, parameter in enumerate(net.parameters()):
                if parameter.grad is not None:
                    total[i] = parameter.grad + (0 if total[i] is None else total[i])
        for buffer, value in zip(net.buffers(), kept or [], strict=True):
            buffer.copy_(value)
        for value, parameter in zip(total, net.parameters(), strict=True):
            parameter.grad = None if value is None else value / len(members)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        sums.append([float(t.detach().double().sum()) for t in net.state_dict().values()])
    return sums


def check(victim: int, how: str, seed: int = 0) -> None:
    results = run_ranks(RANKS, train, victim, how, seed, keep_going=True)
    survivors = [results[rank] for rank in range(RANKS) if rank != victim]
    assert survivors[0] == survivors[1]
    log, buffers_of, sums, _ = survivors[0]
    left = tuple(rank for rank in range(RANKS) if rank != victim)
    assert log[0] == tuple(range(RANKS))
    assert log[-1] == left
    if how in ("forward", "backward"):  # of this step the dead one's gradients cannot be in it
        assert log.index(left) == DEATH
    torch.testing.assert_close(sums, replayed(log, buffers_of), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("victim", "how"), [(1, "forward"), (0, "backward"), (2, "between steps")])
def test_survivors_go_on_with_the_same_step(victim: int, how: str) -> None:
    check(victim, how)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_whenever_the_kill_comes(seed: int) -> None:
    check(seed % RANKS, "any time", seed)


def passes_of(rank: int) -> Any:
    """What each way to run backward leaves in the gradients, in units of a plain one's average."""
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(weight.weight, 0.0)
    model = begin([0, 1], weight)
    mine = torch.full((1, 1), float(rank + 1))
    found: dict[str, float] = {}

    def backward() -> None:
        model(mine).sum().backward()

    def note(name: str) -> None:
        found[name] = float(weight.weight.grad)
        model.zero_grad()

    with DataParallel("model", model).in_use():
        backward()
        note("one")
        backward()
        backward()
        note("two, each averaged")
        with model.no_sync():
            backward()
            backward()
            found["in no_sync"] = float(weight.weight.grad)
        backward()
        note("after no_sync")
        (model(mine) + model(mine)).sum().backward()
        note("two forwards")
        with torch.no_grad():
            model(mine)
        backward()
        note("after an evaluation")
        given = mine.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        assert weight.weight.grad is None
        (model(mine).sum() + slope.sum()).backward()
        note("with a slope in the loss")
    backward()  # with DDP's own reducer again
    note("afterwards")
    return found


def test_each_way_to_run_backward() -> None:
    results = run_ranks(2, passes_of)
    for rank, found in enumerate(results):
        mine = rank + 1.0
        assert found == {
            "one": 1.5,
            "two, each averaged": 3.0,
            "in no_sync": 2 * mine,
            "after no_sync": 4.5,
            "two forwards": 3.0,
            "after an evaluation": 1.5,
            "with a slope in the loss": 2.5,
            "afterwards": 1.5,
        }


def checkpointed(rank: int) -> list[bool]:
    """Layers that a checkpoint computes within backward, by a backward of its own."""
    net, other = Net(checkpoints=True), Net()
    model = begin(list(range(2)), net)
    with DataParallel("model", model).in_use():
        model(batch_of(rank, 0), 0).square().mean().backward()
    total = [torch.zeros_like(p) for p in other.parameters()]
    for member in range(2):
        other.zero_grad()
        other(batch_of(member, 0), 0).square().mean().backward()
        for value, parameter in zip(total, other.parameters(), strict=True):
            value += parameter.grad / 2
    pairs = zip(total, net.parameters(), strict=True)
    return [torch.allclose(value, p.grad, rtol=1e-3, atol=1e-5) for value, p in pairs]


def test_reentrant_checkpoints() -> None:
    for equal in run_ranks(2, checkpointed):
        assert all(equal)


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(InvalidArgumentError) as raised:
        yield
    assert all(word in str(raised.value) for word in words), raised.value


def refusals(rank: int) -> None:
    from kolovod.c10d import data_parallel

    def use(model: Any) -> None:
        with data_parallel._within("net", model):
            pass

    model = begin([0, 1], torch.nn.Linear(2, 2))
    data_parallel.follow(dist.group.WORLD)
    use(model)
    everybody = dist.new_group([0, 1])
    with refused("'net'", "process_group"):
        use(DDP(torch.nn.Linear(2, 2), process_group=everybody))
    hooked = DDP(torch.nn.Linear(2, 2))
    hooked.register_comm_hook(None, a_hook)
    with refused("'net'", "a_hook", "leave it out"):
        use(hooked)
    with DataParallel("net", model).in_use(), refused("'net'", "join()"), model.join():
        model(torch.ones(1, 2))


def a_hook(state, bucket):  # DDP looks at annotations, which are strings here
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_what_cannot_be_elastic_is_named() -> None:
    run_ranks(2, refusals)

"""Sharded optimizers in elastic jobs: whoever is killed wherever, each step is that of one process.

A rank takes part in a sum of gradients that is the same in any order; one process makes the steps
again with the unsharded optimizer, and has the same parameters and the same state, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dying  # noqa: E402
from elastic_script import OfShards, OfWholes  # noqa: E402
from forked import run_torch_ranks as run_ranks  # noqa: E402
from survivors import NoLoss, kill_soon  # noqa: E402
from waiting import Marks  # noqa: E402

import kolovod  # noqa: E402
import kolovod.torch as kv  # noqa: E402
from kolovod.core.transaction import use_transaction  # noqa: E402
from kolovod.core.world import current  # noqa: E402
from kolovod.elastic import State  # noqa: E402
from kolovod.elastic.membership_log import checksums  # noqa: E402
from kolovod.elastic.steps import Steps  # noqa: E402
from kolovod.errors import CollectiveAbortedError, InvalidArgumentError, JobOverError  # noqa: E402

STEPS, DEATH = 7, 3


class Losses(NoLoss):
    """Who is left after each."""

    def __init__(self, alive: list[list[int]]) -> None:
        self.alive = list(alive)

    def reform(self, error: CollectiveAbortedError) -> None:
        assert self.alive, error
        kolovod.shutdown()
        kolovod.init(comm=self.alive.pop(0))


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_in_update(work: Any, rank: int, left: list[int], marks: Marks) -> None:
    """All but these ranks are killed in the step that comes, when each steps with its part.

    All have the step's results then; and those who are left know it: they make marks.
    """

    def before_update(*_: Any) -> None:
        if rank in left:
            marks.make(rank)
        else:
            marks.wait_for(*left)
            die()

    work.optimizer.register_step_pre_hook(before_update)


def die_at(place: str, work: Any) -> None:
    """Be killed there in the step that comes."""
    if place == "moving":  # in the world that follows a loss
        work.optimizer._kolovod_sender.move_state = die
    else:  # at any time
        kill_soon(random.Random(int(place)).uniform(0, 0.03))


def begin(
    rank: int,
    alive: list[list[int]],
    shards: bool = True,
    rate: float = 0,
    kind: type[OfShards] = OfShards,
) -> Any:
    kv.init()
    use_transaction(Steps(Losses(alive), current))
    torch.set_num_threads(1)
    work = kind(0)
    work.shards = shards
    if rate:
        everything = [*work.model.parameters(), work.bits]
        work.optimizer = torch.optim.SGD(everything, rate, momentum=0.9)
    work.distribute(rank)
    return work


def train(
    rank: int,
    size: int,
    deaths: list[tuple[str, list[int]]],
    marks: Marks,
    kind: type[OfShards] = OfShards,
) -> Any:
    """Who took part in each step, and what its result was."""
    alive = [list(range(size))]
    for _, victims in deaths:
        alive.append([r for r in alive[-1] if r not in victims])
    work = begin(rank, alive[1:], kind=kind)
    log: list[tuple[int, dict[str, int]]] = []
    left = sum(1 << r for r in alive[-1])
    # All take the same steps, until it is killed who shall be.
    while len(log) < STEPS or log[-1][0] & ~left:
        step = len(log)
        for number, (place, victims) in enumerate(deaths):
            if step != DEATH + number:
                continue
            if place == "update":
                lose_in_update(work, rank, alive[number + 1], marks)
            elif rank in victims:
                die_at(place, work)
        bits = work.step(SimpleNamespace(step=step), rank)
        log.append((bits, checksums(work.tensors())))
    kept = sum(
        value.numel()
        for entries in work.optimizer.state.values()
        for value in entries.values()
        if value.numel() > 1
    )
    return log, kept, work.optimizer.state_dict()["param_groups"]


def replay(log: list[tuple[int, dict[str, int]]], kind: type[OfShards] = OfShards) -> int:
    """Returns how many elements the whole state has."""
    torch.set_num_threads(1)
    work = kind(0)
    for step, (bits, wanted) in enumerate(log):
        members = [rank for rank in range(8) if bits >> rank & 1]
        sums: dict[str, Any] = {}
        for member in members:
            for name, value in work.compute(step, member).items():
                sums[name] = sums[name] + value if name in sums else value
        work.apply(sums)
        assert checksums(work.tensors()) == wanted, f"step {step} of {members}"
    return sum(v.numel() for e in work.state().values() for v in e.values() if v.numel() > 1)


CASES = [  # each place, of one victim: tests/elastic/test_step_table.py
    (5, [("update", [1, 3])], []),
    (4, [("update", [1]), ("moving", [3])], []),
    (4, [("update", [2, 3])], ["a", "a", "b", "b"]),
]


@pytest.mark.parametrize("kind", [OfShards, OfWholes])
@pytest.mark.parametrize(("size", "deaths", "hosts"), CASES, ids=str)
def test_survivors_have_what_one_process_has(
    size: int,
    deaths: list[tuple[str, list[int]]],
    hosts: list[str],
    kind: type[OfShards],
    tmp_path: Path,
) -> None:
    marks = Marks(tmp_path)
    results = run_ranks(size, train, size, deaths, marks, kind, keep_going=True, hosts=hosts)
    victims = {rank for _, some in deaths for rank in some}
    survivors = [results[rank] for rank in range(size) if rank not in victims]
    log, _, groups = survivors[0]
    assert all((other, its) == (log, groups) for other, _, its in survivors)
    everybody = (1 << size) - 1
    assert log[0][0] == everybody
    assert log[-1][0] == everybody - sum(1 << rank for rank in victims)
    counts = [bits.bit_count() for bits, _ in log]
    assert counts == sorted(counts, reverse=True)
    assert counts[DEATH] == size  # a step that the dead have taken part in
    whole = replay(log, kind)
    shares = 1 if len(survivors) == 1 else 2  # of each part two ranks have the state
    assert sum(kept for _, kept, _ in survivors) == shares * whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OfShards, OfWholes])
@pytest.mark.parametrize("seed", range(10))
def test_whenever_the_kill_comes(seed: int, kind: type[OfShards], tmp_path: Path) -> None:
    victim, size = seed % 3, 3
    deaths = [(f"{seed}", [victim])]
    results = run_ranks(size, train, size, deaths, Marks(tmp_path), kind, keep_going=True)
    one, other = (results[rank] for rank in range(size) if rank != victim)
    assert one[0] == other[0]
    assert one[0][-1][0] == 7 - (1 << victim)
    replay(one[0], kind)


def lose_both(rank: int, marks: Marks) -> str:
    work = begin(rank, [[0, 3]])
    work.step(SimpleNamespace(step=0), rank)
    lose_in_update(work, rank, [0, 3], marks)
    with pytest.raises(JobOverError) as caught:
        work.step(SimpleNamespace(step=1), rank)
    return str(caught.value)


def test_both_holders_of_a_part_are_named_when_they_are_lost(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    first, *_, last = run_ranks(4, lose_both, marks, keep_going=True, hosts=["a", "b", "c", "d"])
    assert first == last
    assert "rank 1 on host b, rank 2 on host c" in first
    assert "checkpoint" in first


def clip(rank: int, shards: bool) -> Any:
    """Rank 1 is lost when gradients are averaged, and the others measure them."""
    work = begin(rank, [[0, 2]], shards, rate=5.0)
    found = []
    for step in range(4):
        work.backward(step, rank)
        work.optimizer.synchronize()
        if step == 2:
            dying.die(rank, 1)
        norm = torch.nn.utils.clip_grad_norm_(list(work.model.parameters()), 0.001)
        found.append(float(norm))
        work.optimizer.step()
    return found, [p.detach().clone() for p in work.model.parameters()]


def test_clipping_where_a_rank_is_lost_uses_the_norm_of_all() -> None:
    first, _, third = run_ranks(3, clip, True, keep_going=True)
    wanted, _, _ = run_ranks(3, clip, False, keep_going=True)
    assert first[0] == third[0]
    assert first[0][2] > 0.001
    assert first[0] == pytest.approx(wanted[0], rel=1e-5)
    for one, other, alone in zip(first[1], third[1], wanted[1], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)


def scale(rank: int, shards: bool) -> Any:
    """One rank has an infinity in a step, which none makes; rank 1 is lost in another."""
    work = begin(rank, [[0, 2]], shards, rate=5.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scales = []
    for step in range(5):
        work.optimizer.zero_grad()
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = work.loss(rows) * (float("inf") if (rank, step) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(work.optimizer)
        if step == 3:
            dying.die(rank, 1)
        scaler.step(work.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach().clone() for p in work.model.parameters()]


def test_scaled_gradients_where_a_rank_is_lost() -> None:
    first, _, third = run_ranks(3, scale, True, keep_going=True)
    wanted, _, _ = run_ranks(3, scale, False, keep_going=True)
    assert first[0] == third[0] == wanted[0] == [1024.0] + [512.0] * 4
    for one, other, alone in zip(first[1], third[1], wanted[1], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)


def go_on_from(rank: int, folder: str) -> Any:
    """A state that rank 0 alone has loaded is everybody's, in parts; a commit sends none of it."""
    work = begin(rank, [])
    if rank == 0:
        work.optimizer.load_state_dict(torch.load(f"{folder}/state"))
    state = State(optimizer=work.optimizer)
    state.sync()
    assert work.optimizer.param_groups[0]["lr"] == 0.03
    state.commit()
    log = []
    for step in range(2):
        bits = work.step(SimpleNamespace(step=step), rank)
        log.append((bits, checksums(work.tensors())))
    return log


def test_a_checkpoint_of_rank_0_is_dealt(tmp_path: Any) -> None:
    plain = OfShards(0)
    plain.apply(plain.compute(9, 0))
    plain.optimizer.param_groups[0]["lr"] = 0.03
    torch.save(plain.optimizer.state_dict(), tmp_path / "state")
    first, second = run_ranks(2, go_on_from, str(tmp_path))
    assert first == second
    work = OfShards(0)
    work.optimizer.load_state_dict(torch.load(tmp_path / "state"))
    for step, (_, wanted) in enumerate(first):
        pair = [work.compute(step, member) for member in (0, 1)]
        work.apply({name: pair[0][name] + pair[1][name] for name in pair[0]})
        assert checksums(work.tensors()) == wanted


def begin_before_run(rank: int) -> None:
    """Steps before ``elastic.run`` leave no copies; the next one makes them."""
    kv.init()
    work = OfShards(0)
    work.distribute(rank)
    log = []
    for step in range(3):
        if step == 1:
            use_transaction(Steps(NoLoss(), current))
        log.append((work.step(SimpleNamespace(step=step), rank), checksums(work.tensors())))
        cut = work.optimizer._kolovod_sender.cut
        assert bool(cut.holders) == bool(cut.copy.tensors) == (step > 0)
    replay(log)
    group = kolovod.add_process_set([0, 1])
    if rank == 2:
        return
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD([weight], 1.0), process_set=group, shard_state=True
    )
    weight.sum().backward()
    with pytest.raises(InvalidArgumentError, match="process_set is"):
        optimizer.step()


def test_steps_before_the_job_is_elastic_and_process_sets_in_it() -> None:
    run_ranks(3, begin_before_run)

"""An elastic job's samples through torch's DataLoader, with and without worker processes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sampled import change_all

from kolovod.elastic.sampler import ElasticSampler

SAMPLES, BATCH = 29, 2


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Random rows, with their labels and indices."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def gradient(model: torch.nn.Module, x: Any, y: Any, weight: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    (torch.nn.functional.mse_loss(model(x), y) * weight).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Rank:
    """A simulated one, in its training loop."""

    def __init__(self, member: int, rows: Rows, workers: int, cuts: bool) -> None:
        self.member = member
        self.sampler = ElasticSampler(rows, BATCH, pad=False)
        self.loader: torch.utils.data.DataLoader[Any]
        if cuts:
            self.loader = torch.utils.data.DataLoader(
                rows, BATCH, sampler=self.sampler, num_workers=workers
            )
        else:
            self.loader = torch.utils.data.DataLoader(
                rows, batch_sampler=self.sampler.batches(), num_workers=workers
            )

    def loop(self) -> Iterator[tuple[Any, float]]:
        while self.sampler.steps_left:
            for batch in self.loader:
                yield batch, self.sampler.weight


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_gradients_are_those_of_the_samples_and_each_counts_once(workers: int, cuts: bool) -> None:
    rows, model = Rows(), torch.nn.Linear(3, 1, dtype=torch.float64)
    ranks = [Rank(member, rows, workers, cuts) for member in range(3)]
    change_all([(rank.sampler, rank.member) for rank in ranks])
    loops = {rank.member: rank.loop() for rank in ranks}
    counts: Counter[int] = Counter()
    for number in range(99):
        if number == 2:  # a rank has come
            new = Rank(3, rows, workers if number else 0, cuts)
            ranks.append(new)
            change_all([(rank.sampler, rank.member) for rank in ranks])
            loops[3] = new.loop()
        if not ranks[0].sampler.steps_left:
            break
        taken = {rank.member: next(loops[rank.member]) for rank in ranks}
        if number in (1, 3):  # a rank dies in the middle of the step
            ranks.pop(random.Random(number).randrange(len(ranks)))
        members = [rank.member for rank in ranks]
        total = sum(gradient(model, x, y, w) for (x, y, _), w in map(taken.get, members))  # type: ignore[misc]
        average = total / len(members) * ranks[0].sampler.correction(members)
        indices = [i for m in members for i in taken[m][0][2].tolist() if taken[m][1]]
        if indices:
            torch.testing.assert_close(average, gradient(model, rows.x[indices], rows.y[indices]))
        counts.update(indices)
        for rank in ranks:
            rank.sampler.record_step(members)
        if number in (1, 3):
            change_all([(rank.sampler, rank.member) for rank in ranks])
    assert counts == Counter(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_are_accumulated_to_the_gradient_of_the_step(workers: int) -> None:
    rows, model = Rows(), torch.nn.Linear(3, 1, dtype=torch.float64)
    samplers = [
        ElasticSampler(rows, 3, pad=False, samples_per_step=10, rank=rank, size=2)
        for rank in range(2)
    ]
    loops = [
        sampler.steps(
            torch.utils.data.DataLoader(rows, batch_sampler=sampler.batches(), num_workers=workers)
        )
        for sampler in samplers
    ]
    sizes = []
    while samplers[0].steps_left:
        taken = [list(next(loop)) for loop in loops]
        total = sum(gradient(model, x, y, w) for step in taken for (x, y, _), w in step)
        indices = [i for step in taken for (_, _, k), w in step if w for i in k.tolist()]
        assert isinstance(total, torch.Tensor)
        torch.testing.assert_close(total / 2, gradient(model, rows.x[indices], rows.y[indices]))
        sizes.append(len(indices))
        for sampler in samplers:
            sampler.record_step()
    assert sizes == [10, 10, 9]

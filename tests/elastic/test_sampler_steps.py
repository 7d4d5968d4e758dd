"""Steps of an elastic job's samples: equally many in each, and what a wrong use is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from sampled import Loader, change, world

from kolovod.elastic.sampler import ElasticSampler
from kolovod.elastic.sampling import global_batch
from kolovod.errors import InvalidArgumentError

# --- the same number of samples in each step ---


@pytest.mark.parametrize(
    ("samples", "size", "most", "expected"),
    [(64, 4, 16, (1, 16)), (64, 3, 16, (2, 11)), (64, 1, 16, (4, 16)), (5, 8, 2, (1, 1))],
)
def test_global_batch(samples: int, size: int, most: int, expected: tuple[int, int]) -> None:
    assert global_batch(samples, size, most) == expected


def test_global_batch_is_as_small_as_can_be() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        samples, size, most = (draw.randrange(1, 200), draw.randrange(1, 9), draw.randrange(1, 40))
        passes, batch = global_batch(samples, size, most)
        assert batch <= most
        assert passes == 1 or (passes - 1) * size * most < samples
        assert (batch - 1) * size * passes < samples <= batch * size * passes


def test_a_step_keeps_its_samples_when_the_size_changes() -> None:
    samplers = world(4, range(640), 16, False, pad=False, samples_per_step=64)
    change(samplers, [0, 1, 2, 3])
    loops = [sampler.steps(sampler.batches()) for sampler in samplers]
    seen: list[int] = []
    for size, passes in ((4, 1), (3, 2), (1, 4), (1, 4)):
        if size < len(samplers):
            samplers, loops = samplers[:size], loops[:size]
            change(samplers, list(range(size)))
        assert {sampler.passes for sampler in samplers} == {passes}
        taken = [list(next(loop)) for loop in loops]
        sizes = [len(batch) for step in taken for batch, _ in step]
        assert (sum(sizes), len(sizes)) == (64, size * passes)
        assert max(sizes) - min(sizes) <= 1
        assert sum(weight for step in taken for _, weight in step) == pytest.approx(size)
        seen += [index for step in taken for batch, _ in step for index in batch]
        for sampler in samplers:
            sampler.record_step()
    assert sorted(seen) == list(range(256))


def test_what_is_drawn_ahead_is_part_of_the_step() -> None:
    samplers = world(2, range(640), 16, False, pad=False, samples_per_step=64)
    change(samplers, [0, 1])
    loops = [sampler.steps(Loader(sampler, 2, cuts=False)) for sampler in samplers]
    for loop, sampler in zip(loops, samplers, strict=True):
        list(next(loop))
        sampler.record_step()
    others = [ElasticSampler(range(640), 16, False, pad=False, samples_per_step=64) for _ in "23"]
    samplers += others
    loops += [sampler.steps(Loader(sampler, 0, cuts=False)) for sampler in others]
    change(samplers, [0, 1, 2, 3])
    for _ in range(3):  # two batches of 16 are there, and 16 are taken by each of the new ranks
        assert {sampler.samples for sampler in samplers} == {64}
        sizes = [[len(batch) for batch, _ in next(loop)] for loop in loops]
        assert sizes == [[16]] * 4
        for sampler in samplers:
            sampler.record_step()
    short = [ElasticSampler(range(640), 16, False, pad=False, samples_per_step=40) for _ in "01"]
    change(short[:1], [0])  # three passes of 14, 13 and 13
    first = short[0].steps(Loader(short[0], 3, cuts=False))
    list(next(first))
    short[0].record_step()
    change(short, [0, 1])  # two passes of 10; 14, 13 and 13 are there
    assert [short[0]._progress.plan.weights(step) for step in range(3)] == [
        [14, 7, 13, 6],
        [13, 9, 9, 9],
        [10, 10, 10, 10],
    ]


# --- wrong use ---


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"samples_per_step": 0, "pad": False}, "samples_per_step is 0"),
        ({"samples_per_step": 8}, "samples_per_step is 8 and pad is set"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        ElasticSampler(range(4), **{"batch_size": 1, **arguments})


def test_wrong_use_is_told() -> None:
    sampler = ElasticSampler(range(4), 2, rank=0, size=1)
    with pytest.raises(InvalidArgumentError, match="0 have been drawn"):
        sampler.record_step()
    with pytest.raises(InvalidArgumentError, match="epoch is 'x'"):
        sampler.set_epoch("x")  # type: ignore[arg-type]
    loop = iter(sampler.batches())
    next(loop)
    with pytest.raises(InvalidArgumentError, match=r"members is \[0, 9\], but \[9\]"):
        sampler.record_step([0, 9])
    sampler.record_step()
    next(loop)
    sampler.record_step()
    with pytest.raises(InvalidArgumentError, match="after all 2 steps of epoch 0"):
        sampler.record_step()
    with pytest.raises(InvalidArgumentError, match="set_epoch begins another one"):
        iter(sampler)
    with pytest.raises(InvalidArgumentError, match="no step is at hand"):
        _ = sampler.weight
    with pytest.raises(InvalidArgumentError, match="rank is 2 of 2"):
        next(iter(ElasticSampler(range(4), 2, rank=2, size=2)))
    many = ElasticSampler(range(9), 2, pad=False, samples_per_step=6, rank=0, size=1)
    with pytest.raises(InvalidArgumentError, match="give batches"):
        iter(many)
    with pytest.raises(InvalidArgumentError, match="3 passes"):
        _ = many.weight


def test_steps_tell_what_is_forgotten() -> None:
    sampler = ElasticSampler(range(8), 2, rank=0, size=1)
    loop = sampler.steps(sampler.batches())
    next(loop)
    with pytest.raises(InvalidArgumentError, match="step 0 of epoch 0 has not been recorded"):
        next(loop)
    with pytest.raises(InvalidArgumentError, match="does it draw from this sampler"):
        list(next(sampler.steps([])))


def test_a_loader_of_another_batch_size_is_found() -> None:
    sampler = ElasticSampler(range(8), 2, rank=0, size=1)

    class Wide:
        def __iter__(self) -> Iterator[list[int]]:
            indices = list(sampler)
            yield from (indices[:4], indices[4:])

    def train() -> None:
        for batches in sampler.steps(Wide()):
            list(batches)
            sampler.record_step()

    with pytest.raises(InvalidArgumentError, match=r"after 2 batches of 4 .*cut batches of 2"):
        train()


def test_a_member_must_be_in_the_steps_that_it_records() -> None:
    samplers = world(2, range(8), 2)
    change(samplers, [4, 6])
    next(iter(samplers[0].batches()))
    with pytest.raises(InvalidArgumentError, match=r"members is \[6\]: this is member 4"):
        samplers[0].record_step([6])

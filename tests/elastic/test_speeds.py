"""Shares of samples by the speed of ranks: who takes what, and how a rank measures itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sampled import KnownSpeed, change, world

from kolovod.core import spans
from kolovod.elastic.sampler import ElasticSampler
from kolovod.elastic.speeds import SpeedMeter, is_due, shares_of, split, waiting_ns
from kolovod.errors import InvalidArgumentError
from kolovod.observe.recorder import Batch


@given(st.integers(0, 500), st.lists(st.integers(1, 1000), min_size=1, max_size=9), st.integers())
@example(1, [1, 1], 0)
def test_a_split_ends_as_early_as_can_be(total: int, shares: list[int], room: int) -> None:
    most = -(-total // len(shares)) + abs(room) % 50
    parts = split(total, shares, most)
    assert sum(parts) == total
    assert max(parts, default=0) <= most
    assert min(parts) >= (total >= len(shares))
    for part, share in zip(parts, shares, strict=True):
        for other, theirs in zip(parts, shares, strict=True):
            if part > 1 and other < most:
                assert part * theirs <= (other + 1) * share


def test_equal_shares_are_those_of_a_sampler_without_speeds() -> None:
    for total in range(40):
        share, more = divmod(total, 7)
        assert split(total, [3] * 7, 40) == [share + 1] * more + [share] * (7 - more)


@pytest.mark.parametrize(
    ("speeds", "before", "expected"),
    [
        ({}, {}, {}),
        ({0: 0.0, 1: 0.0}, {}, {}),
        ({0: 30.0, 1: 10.0}, {}, {0: 7500, 1: 2500}),
        ({0: 30.0, 1: 0.0}, {}, {}),  # nothing is known of the other one: as many
        ({0: 10.0, 1: 10.2}, {}, {}),  # hardly different
        ({0: 30.0, 1: 10.1}, {0: 7500, 1: 2500}, {0: 7500, 1: 2500}),
        ({0: 20.0, 1: 10.0}, {0: 7500, 1: 2500}, {0: 6667, 1: 3333}),
        ({}, {0: 7500, 2: 2500}, {0: 7500, 1: 5000}),  # 2 is gone, 1 has come
        ({0: 0.0, 1: 1e300}, {0: 1, 1: 9999}, {0: 5000, 1: 5000}),
        ({0: 1e-9, 1: 1e9}, {}, {0: 1, 1: 10000}),
    ],
)
def test_shares(speeds: dict[int, float], before: dict[int, int], expected: dict[int, int]) -> None:
    assert shares_of(speeds, [0, 1], before) == expected


def test_shares_are_agreed_on_more_and_more_rarely() -> None:
    assert [done for done in range(700) if is_due(done)] == [10, 20, 40, 80, 160, 320, 480, 640]


# --- samplers ---


def shared(speeds: list[float], *args: Any, **kwargs: Any) -> list[ElasticSampler]:
    samplers = world(len(speeds), *args, pad=False, by_speed=True, **kwargs)
    for sampler, speed in zip(samplers, speeds, strict=True):
        sampler._meter = KnownSpeed(speed)  # type: ignore[assignment]
    change(samplers, list(range(len(speeds))))
    return samplers


def step(loops: list[Iterator[list[int]]], samplers: list[ElasticSampler]) -> list[list[int]]:
    batches = [next(loop) for loop in loops]
    for sampler in samplers:
        sampler.record_step()
    return batches


def test_ranks_take_samples_by_their_speeds() -> None:
    samplers = shared([30, 10, 20], range(90), 20, False, samples_per_step=30)
    loops = [iter(sampler.batches()) for sampler in samplers]
    batches = [next(loop) for loop in loops]
    assert [len(batch) for batch in batches] == [15, 5, 10]
    assert [sampler.weight for sampler in samplers] == [1.5, 0.5, 1]
    np.testing.assert_allclose(samplers[1].shares, [1 / 2, 1 / 6, 1 / 3], atol=1e-3)
    values = np.arange(90.0) ** 2
    means = [
        float(values[batch].mean()) * s.weight for batch, s in zip(batches, samplers, strict=True)
    ]
    assert np.mean(means) == pytest.approx(values[:30].mean())


def test_no_rank_takes_more_than_it_can_and_each_has_a_sample() -> None:
    samplers = shared([1000, 1, 1], range(64), 8, False, samples_per_step=16)
    assert [len(next(iter(sampler.batches()))) for sampler in samplers] == [8, 4, 4]
    samplers = shared([1000, 1, 1], range(64), 16, False, samples_per_step=16)
    assert [len(next(iter(sampler.batches()))) for sampler in samplers] == [14, 1, 1]


def test_passes_are_shared_by_speed_too() -> None:
    samplers = shared([3, 1], range(64), 8, False, samples_per_step=20)
    assert samplers[0].passes == 2
    sizes = [[len(b) for b in list(sampler.batches())[:2]] for sampler in samplers]
    assert sizes == [[8, 8], [2, 2]]
    assert samplers[0].weights == [0.8, 0.8]
    assert samplers[1].weights == [0.2, 0.2]


def test_shares_follow_speeds_that_change_and_last_beyond_an_epoch() -> None:
    samplers = shared([1, 1], range(72), 12, samples_per_step=12)
    sizes: list[list[int]] = []
    for epoch in range(3):  # of six steps each
        counts: Counter[int] = Counter()
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loops = [iter(sampler.batches()) for sampler in samplers]
        for _ in range(6):
            batches = step(loops, samplers)
            sizes.append([len(batch) for batch in batches])
            counts.update(index for batch in batches for index in batch)
            assert samplers[0].is_due == samplers[1].is_due == (len(sizes) == 10)
            if samplers[0].is_due:
                samplers[0]._meter.speed = 2.0  # type: ignore[misc]
                change(samplers, [0, 1])
        assert counts == Counter(range(72))
    assert sizes == [[6, 6]] * 10 + [[8, 4]] * 8
    assert samplers[0].shares == [0.6667, 0.3333]


def test_shares_that_stay_deal_nothing_anew() -> None:
    samplers = shared([2, 1], range(36 * 12), 12, samples_per_step=12)
    loops = [iter(sampler.batches()) for sampler in samplers]
    for number in range(1, 37):
        step(loops, samplers)
        before = samplers[0]._progress
        if samplers[0].is_due:
            assert number in (10, 20)
            change(samplers, [0, 1])
            assert samplers[0]._progress is before


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({}, "by_speed is True and samples_per_step None"),
        ({"samples_per_step": 8, "pad": True}, "pad is set"),
    ],
)
def test_what_cannot_be_shared_by_speed_is_told(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        ElasticSampler(range(8), 4, **{"pad": False, "by_speed": True, **kwargs})


# --- measuring ---


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rank_measures_its_own_work() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    for done in range(1, 11):
        assert spans.log.on == (3 <= done <= 10)
        clock.now_s += 4.0 if done < 10 else 400.0  # the last one is odd
        spans.log.add(spans.WAIT_FOR_GRADIENTS, 0, 1_000_000_000)
        spans.log.add(spans.WAIT, 500_000_000, 2_000_000_000)
        spans.log.add(spans.OPTIMIZER_STEP, 0, 3_500_000_000)
        meter.step(done, 6)
    assert not spans.log.on
    assert meter.speed == 3.0
    meter.forget()
    assert meter.speed == 0.0


def test_a_step_without_samples_or_work_says_nothing_of_speed() -> None:
    clock = Clock()
    meter = SpeedMeter(clock)
    for done in range(1, 11):
        clock.now_s += 1.0
        if done % 2:
            spans.log.add(spans.WAIT, 0, 2_000_000_000)
        meter.step(done, 6 if done % 2 else 0)
    assert meter.speed == 0.0


def test_in_graphs_the_longest_wait_for_others_counts() -> None:
    operations = [
        ("", "a", "allreduce", "float32", 1, 4, 1, True, 1_000, 5_000, 9_000),
        ("", "b", "allreduce", "float32", 1, 4, 2, True, 2_000, 9_000, 9_500),
        ("", "c", "allreduce", "float32", 1, 4, 0, True, 8_000, 0, 9_000),
    ]
    assert waiting_ns(Batch(operations, [])) == 7_000
    assert waiting_ns(Batch([], [])) == 0

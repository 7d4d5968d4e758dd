"""Samples of an elastic job: each counts once in an epoch, whoever dies, comes and leaves."""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from typing import Any

import pytest
from sampled import Loader, change, play, world
from slow import thorough_but

from kolovod.elastic.sampler import ElasticSampler
from kolovod.elastic.sampling import Batch, Plan, Progress, Rules
from kolovod.errors import InvalidArgumentError, MismatchError

SCHEDULES = 1000


@pytest.mark.parametrize(
    "part", [0, pytest.param(1, marks=pytest.mark.slow), *thorough_but([], range(2, 21))]
)
def test_each_sample_counts_once_whatever_happens(part: int) -> None:
    schedules = range(300) if part == 0 else range(part * SCHEDULES, (part + 1) * SCHEDULES)
    events: Counter[str] = Counter()
    for seed in schedules:
        events += play(seed)
    for event in ("joined", "left", "died in a step", "died in an exchange", "restarted", "idle"):
        assert events[event] > len(schedules) // 20, events
    assert events["shared by speed"] > len(schedules) // 5, events
    assert events["due"] > len(schedules) // 50, events


def step(iterators: list[Any], samplers: list[ElasticSampler], **kwargs: Any) -> list[Any]:
    batches = [next(iterator) for iterator in iterators]
    for sampler in samplers:
        sampler.record_step(**kwargs)
    return batches


# --- orders and sizes ---


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    sampler = ElasticSampler(range(8), 4, seed=3, rank=0, size=1)
    sampler.set_epoch(2)
    assert list(sampler) == [3, 7, 4, 0, 1, 6, 2, 5]
    orders = {
        tuple(ElasticSampler(range(40), 4, seed=seed, rank=0, size=1)) for seed in (0, 1, -1, 2**40)
    }
    sampler = ElasticSampler(range(40), 4, rank=0, size=1)
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
    assert len(orders) == 6 - 1  # seeds are taken modulo 2**32
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(40))}
    assert list(ElasticSampler(range(5), 4, False, rank=0, size=1)) == [0, 1, 2, 3, 4]


def test_with_padding_all_ranks_have_equally_many() -> None:
    batches = [list(sampler.batches()) for sampler in world(3, range(20), 4, False)]
    assert [list(map(len, mine)) for mine in batches] == [[4, 3]] * 3
    counts = Counter(index for mine in batches for batch in mine for index in batch)
    assert set(counts) == set(range(20))
    assert sum(counts.values()) == 21


def test_without_padding_the_last_batches_differ_by_at_most_one_sample() -> None:
    samplers = world(3, range(20), 4, False, pad=False)
    batches = [list(sampler.batches()) for sampler in samplers]
    assert [list(map(len, mine)) for mine in batches] == [[4, 3], [4, 3], [4, 2]]
    assert sorted(i for mine in batches for batch in mine for i in batch) == list(range(20))


def test_a_rank_without_a_sample_has_one_that_has_no_weight() -> None:
    samplers = world(3, range(2), 4, False, pad=False)
    assert [list(sampler.batches()) for sampler in samplers] == [[[0]], [[1]], [[0]]]
    assert [sampler.weight for sampler in samplers] == [1.5, 1.5, 0]
    assert [list(sampler) for sampler in samplers] == [[0], [1], [0]]


@pytest.mark.parametrize("pad", [False, True])
def test_no_samples_make_no_steps(pad: bool) -> None:
    for sampler in world(2, [], 4, pad=pad):
        assert (sampler.steps_left, len(sampler), len(sampler.batches())) == (0, 0, 0)
        assert list(sampler) == list(sampler.batches()) == list(sampler.steps([])) == []


def test_lengths_include_what_is_done() -> None:
    sampler = ElasticSampler(range(10), 4, rank=0, size=1, pad=False)
    batches = sampler.batches()
    assert (len(sampler), len(batches)) == (10, 3)
    iterator = iter(batches)
    step([iterator], [sampler])
    assert (len(sampler), len(batches)) == (10, 3)
    assert (sampler.steps_done, sampler.steps_left) == (1, 2)


# --- changes ---


def test_what_is_drawn_ahead_stays_with_its_rank_and_the_rest_is_shared() -> None:
    samplers = world(2, range(24), 2, False, pad=False)
    change(samplers, [5, 7])
    loops = [iter(Loader(samplers[0], 1, cuts=False)), iter(Loader(samplers[1], 3, cuts=False))]
    assert step(loops, samplers) == [[0, 1], [2, 3]]
    samplers.append(ElasticSampler(range(24), 2, False, pad=False))
    change(samplers, [5, 7, 9])
    loops.append(iter(Loader(samplers[2], 0, cuts=False)))
    # Rank 0 holds 4, 5 and rank 1 holds 6, 7, then 10, 11, then 14, 15.
    assert step(loops, samplers) == [[4, 5], [6, 7], [8, 9]]
    assert step(loops, samplers) == [[12, 13], [10, 11], [16, 17]]
    assert step(loops, samplers) == [[18, 19], [14, 15], [20, 21]]
    assert step(loops, samplers) == [[22], [23], [2]]
    assert not any(sampler.steps_left for sampler in samplers)


def test_a_batch_of_the_dead_counts_if_its_step_did() -> None:
    for counts in (True, False):
        samplers = world(2, range(8), 2, False, pad=False)
        change(samplers, [1, 2])
        loops = [iter(sampler.batches()) for sampler in samplers]
        batches = [next(loop) for loop in loops]
        assert batches == [[0, 1], [2, 3]]
        samplers[0].record_step([1, 2] if counts else [1])
        change(samplers[:1], [1])
        rest = list(loops[0])
        assert rest == [[4, 5], [6, 7]] if counts else [[2, 3], [4, 5], [6, 7]]


def test_who_has_been_lost_does_not_count_again() -> None:
    samplers = world(2, range(12), 2, False, pad=False)
    change(samplers, [1, 2])
    loop = iter(samplers[0].batches())
    for members in ([1], None, [1, 2]):
        next(loop)
        samplers[0].record_step(members)
    change(samplers[:1], [1])
    assert list(loop) == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_step_without_samples_is_left_out_unless_some_will_come_back(is_lost: bool) -> None:
    real, nothing = Batch(((0, 1),)), Batch((), (0,))
    plan = Plan(Rules(1, 1, False), (1, 2), ((real,), (nothing, nothing)), ())
    assert [plan.weights(0), plan.weights(1)] == [[1, 0], [0, 0]]
    sampler = ElasticSampler(range(1), 1, pad=False)
    change([sampler], [2])
    sampler._progress, sampler._rank = Progress(0, 0, plan, 0, (0, 0)), 1
    seen = []
    for number, step in enumerate(sampler.steps(Loader(sampler, 9, cuts=False))):
        seen += list(step)
        sampler.record_step([2] if is_lost else None)
        if number == 1:
            change([sampler], [2])
    assert seen == ([([0], 0), ([0], 0), ([0], 1)] if is_lost else [([0], 0)])
    assert (sampler.steps_left, sampler.steps_done) == (0, 3 if is_lost else 2)


def test_a_loop_that_has_drawn_all_is_begun_again_when_samples_come_back() -> None:
    samplers = world(2, range(4), 1, False, pad=False)
    change(samplers, [1, 2])
    seen = []
    loops = [
        samplers[0].steps(Loader(samplers[0], 9, cuts=False)),
        samplers[1].steps(Loader(samplers[1], 9, cuts=False)),
    ]
    for loop in loops:
        list(next(loop))
    samplers[0].record_step([1])
    change(samplers[:1], [1])
    for number, batches in enumerate(loops[0]):
        seen += [index for batch, _ in batches for index in batch]
        samplers[0].record_step()
        assert number < 9
    assert sorted(seen) == [1, 2, 3]


def test_an_iteration_that_has_ended_stays_at_its_end() -> None:
    samplers = world(2, range(4), 1, False)
    change(samplers, [1, 2])
    loops = [iter(sampler.batches()) for sampler in samplers]
    assert list(loops[0]) == [[0], [2]]
    next(loops[1])
    samplers[0].record_step([1])
    change(samplers[:1], [1])
    assert samplers[0].steps_left == 3
    assert list(loops[0]) == []
    assert list(samplers[0].batches()) == [[2], [1], [3]]


def test_a_loader_may_draw_in_a_thread_while_the_ranks_change() -> None:
    sampler = ElasticSampler(range(500), 3, pad=False)
    change([sampler], [0])
    waiting, seen = queue.Queue[Any](5), []

    def load() -> None:
        for batch in sampler.batches():
            waiting.put(batch, timeout=20)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    for number in range(100):
        seen += waiting.get(timeout=20)
        sampler.record_step()
        change([sampler], [0])
        assert sampler.steps_left == 166 - number
    while sampler.steps_left:
        seen += waiting.get(timeout=20)
        sampler.record_step()
    thread.join(20)
    assert sorted(seen) == list(range(500))


def test_who_comes_goes_on_where_the_others_are() -> None:
    old = ElasticSampler(range(12), 2, seed=3, rank=0, size=1)
    old.set_epoch(4)
    change([old], [0])
    loop = iter(old.batches())
    step([loop], [old])
    new = ElasticSampler(range(12), 2, seed=3)
    new.set_epoch(1)
    new._given = 0, 1  # so it can draw before
    early = iter(new.batches())
    next(early)
    change([old, new], [0, 1])
    assert list(early) == []
    with pytest.raises(InvalidArgumentError, match="0 have been drawn"):
        new.record_step()
    assert (new.epoch, new.steps_done, new.steps_left) == (4, 1, old.steps_left)
    new.set_epoch(4)  # no effect
    assert new.steps_done == 1
    rest = [*list(loop), *list(new.batches())]
    assert len({index for batch in rest for index in batch}) == 10


def test_an_error_in_the_exchange_changes_nothing() -> None:
    sampler = ElasticSampler(range(12), 2, rank=0, size=1)
    change([sampler], [0])
    loop = iter(sampler.batches())
    step([loop], [sampler])
    before = sampler._progress

    def allgather(value: Any) -> list[Any]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        sampler.changed(0, allgather)
    assert sampler._progress is before
    thread = threading.Thread(target=sampler.set_epoch, args=(1,), daemon=True)
    thread.start()
    thread.join(20)
    assert sampler.epoch == 1  # the lock is free


def test_ranks_that_differ_are_told() -> None:
    samplers = world(2, range(12), 2)
    samplers[1] = ElasticSampler(range(13), 2)
    with pytest.raises(MismatchError, match=r"rank 1 has .*length=13.* rank 0 one with .*12"):
        change(samplers, [0, 1])
    samplers = world(2, range(12), 2)
    change(samplers, [0, 1])
    loops = [iter(sampler.batches()) for sampler in samplers]
    step(loops[:1], samplers[:1])
    with pytest.raises(MismatchError, match=r"rank 1's sampler is at step 0 of epoch 0.*step 1"):
        change(samplers, [0, 1])
    with pytest.raises(InvalidArgumentError, match=r"members \[3, 3\]"):
        change(world(2, range(12), 2), [3, 3])


# --- checkpoints ---


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(size: int) -> None:
    samplers = world(3, range(31), 2, seed=1, pad=False)
    for sampler in samplers:
        sampler.set_epoch(2)
    loops = [iter(Loader(sampler, 2, cuts=False)) for sampler in samplers]
    seen = [index for _ in range(3) for batch in step(loops, samplers) for index in batch]
    states = [json.dumps(sampler.state_dict()) for sampler in samplers]
    assert len(set(states)) == 1
    others = world(size, range(31), 2, seed=1, pad=False)
    for other in others:
        other.load_state_dict(json.loads(states[0]))
        assert (other.epoch, other.steps_done) == (2, 3)
    loops = [iter(other.batches()) for other in others]
    while others[0].steps_left:
        weights = [other.weight for other in others]
        for batch, weight in zip(step(loops, others), weights, strict=True):
            seen += batch if weight else []
    assert sorted(seen) == list(range(31))


def test_a_state_of_other_data_is_refused() -> None:
    sampler = ElasticSampler(range(10), 2, rank=0, size=1)
    good = sampler.state_dict()
    for wrong, text in (
        ({"length": 11}, r"\(11, 0, True\)"),
        ({"seed": 5}, "5"),
        ({"left": [[0, 11]]}, r"\[0, 11\]"),
        ({"left": [[3, 2]]}, r"\[3, 2\]"),
        ({"left": [[0, 3], [2, 4]]}, "ascending"),
        ({"left": [[-1, 2]]}, "-1"),
        ({"left": 3}, "not the state"),
        ({"epoch": None}, "not the state"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            sampler.load_state_dict({**good, **wrong})
    with pytest.raises(InvalidArgumentError, match="epoch"):
        sampler.load_state_dict({})


def test_going_back_ends_what_iterates() -> None:
    sampler = ElasticSampler(range(8), 2, False, rank=0, size=1)
    loop, state = iter(sampler.batches()), sampler.state_dict()
    step([loop], [sampler])
    sampler.load_state_dict(state)
    assert list(loop) == []
    assert next(iter(sampler.batches())) == [0, 1]

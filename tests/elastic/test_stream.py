"""Streams of an elastic job: each sample counts once in an epoch, whoever dies, comes, leaves."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from forked import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import thorough_but
from streamed import Stateful, change, play, step

import kolovod.numpy as kv
from kolovod.elastic import ElasticSampler, ElasticStream, State
from kolovod.elastic.dealt_data import hold
from kolovod.elastic.reading import samples_of
from kolovod.elastic.streaming import Report
from kolovod.errors import InvalidArgumentError, MismatchError

SCHEDULES = 1000


@pytest.fixture
def world() -> Iterator[None]:
    """One of this process alone."""
    kv.init()
    yield
    kv.shutdown()


@pytest.mark.parametrize(
    "part", [0, pytest.param(1, marks=pytest.mark.slow), *thorough_but([], range(2, 21))]
)
def test_each_sample_counts_once_whatever_happens(part: int) -> None:
    schedules = range(100) if part == 0 else range(part * SCHEDULES, (part + 1) * SCHEDULES)
    events: Counter[str] = Counter()
    for seed in schedules:
        events += play(random.Random(seed))
    for event in (
        *("joined", "left", "died in a step", "died in a round", "died in an exchange"),
        *("restarted", "went back", "idle", "nothing left for a rank", "loaded"),
    ):
        assert events[event] > len(schedules) // 20, event


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_schedules_that_hypothesis_draws(draw: random.Random) -> None:
    play(draw)


# --- streams without faults ---


def stream_of(lengths: list[int], **kwargs: Any) -> ElasticStream[list[int]]:
    """One of parts with so many batches of two samples each."""

    def make(part: int, parts: int, epoch: int) -> Iterator[list[int]]:
        return iter([[100 * part + 2 * k, 100 * part + 2 * k + 1] for k in range(lengths[part])])

    return ElasticStream(make, len(lengths), **kwargs)


def test_a_rank_takes_the_next_free_part_and_at_the_end_repeats_without_weight() -> None:
    streams = [stream_of([1, 3, 0, 1, 0]) for _ in range(2)]
    change(streams, [0, 1])
    assert step(streams) == {0: ([0, 1], 1), 1: ([100, 101], 1)}
    assert step(streams) == {0: ([300, 301], 1), 1: ([102, 103], 1)}
    assert step(streams) == {0: ([300, 301], 0), 1: ([104, 105], 2)}
    assert step(streams) is None
    assert [stream.samples_done for stream in streams] == [10, 10]


def test_more_ranks_than_parts() -> None:
    streams = [stream_of([2]) for _ in range(3)]
    change(streams, [0, 1, 2])
    assert step(streams) == {0: ([0, 1], 3), 1: ([0, 1], 0), 2: ([0, 1], 0)}
    assert step(streams) == {0: ([2, 3], 3), 1: ([0, 1], 0), 2: ([0, 1], 0)}
    assert step(streams) is None


def test_weights_are_shares_of_the_samples() -> None:
    streams = [
        ElasticStream(lambda part, parts, epoch: [np.zeros(1 + 2 * part)], 2) for _ in range(2)
    ]
    change(streams, [0, 1])
    taken = step(streams)
    assert taken is not None
    assert [weight for _, weight in taken.values()] == [0.5, 1.5]


@pytest.mark.usefixtures("world")
def test_in_one_process() -> None:
    stream = stream_of([2, 0, 1])
    state = State(stream=stream)
    for epoch in range(2):
        stream.set_epoch(epoch)
        seen = []
        for batch, weight in stream.steps():
            assert (weight, stream.samples) == (1, 2)
            seen.append(batch)
            state.commit()
        assert seen == [[0, 1], [2, 3], [200, 201]]
        assert (stream.epoch, stream.steps_done, stream.samples_done) == (epoch, 3, 6)
        assert list(stream.steps()) == []  # it is over
        assert all(has_ended for *_, has_ended in stream.state_dict()["parts"])
        again = stream_of([2, 0, 1])
        again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert list(again.steps()) == []


def batches_of_a_rank(rank: int) -> list[tuple[list[int], float]]:
    kv.init()
    stream = stream_of([5, 0, 3, 1, 4])
    taken = []
    for batch in stream.steps():
        taken.append(batch)
        assert kv.allreduce(np.array(batch[1]), op=kv.Sum) == kv.size()
        stream.record_step()
    assert stream.samples_done == 26
    kv.shutdown()
    return taken


def test_ranks_of_a_job_that_is_not_elastic_have_equally_many_steps() -> None:
    taken = run_ranks(3, batches_of_a_rank)
    assert len(set(map(len, taken))) == 1
    seen = Counter(sample for each in taken for batch, weight in each if weight for sample in batch)
    parts = {0: 5, 2: 3, 3: 1, 4: 4}
    assert seen == Counter(100 * part + k for part, n in parts.items() for k in range(2 * n))


@pytest.mark.usefixtures("world")
def test_all_parts_may_be_empty() -> None:
    assert list(stream_of([0, 0]).steps()) == []


@pytest.mark.usefixtures("world")
def test_a_step_that_was_not_recorded_gets_its_batch_again() -> None:
    stream = stream_of([3])
    assert next(stream.steps())[0] == [0, 1]
    assert next(stream.steps())[0] == [0, 1]
    stream.record_step()
    assert next(stream.steps())[0] == [2, 3]


@pytest.mark.usefixtures("world")
def test_a_loader_that_has_read_on_is_made_anew_where_ranks_go_back() -> None:
    stream = stream_of([4])
    step([stream])
    restore = stream.keep()
    assert [step([stream]) for _ in range(2)] == [{0: ([2, 3], 1)}, {0: ([4, 5], 1)}]
    restore()
    assert [step([stream]) for _ in range(2)] == [{0: ([2, 3], 1)}, {0: ([4, 5], 1)}]


def test_who_goes_on_loads_the_last_snapshot_and_reads_what_came_after() -> None:
    reads: Counter[str] = Counter()

    def make(part: int, parts: int, epoch: int) -> Any:
        return Stateful([[k] for k in range(9)], reads)

    first = ElasticStream(make, 1, snapshot_every=4)
    change([first], [0])
    for _ in range(7):
        step([first])
    state = json.loads(json.dumps(first.state_dict()))
    assert state["parts"] == [[7, 7, False]]
    assert state["snapshots"] == [[0, 4, {"at": 4}]]
    other = ElasticStream(make, 1, snapshot_every=4)
    other.load_state_dict(state)
    reads.clear()
    change([other], [0])
    assert step([other]) == {0: ([7], 1)}
    assert reads == {"loaded": 1, "batches": 4}


def test_a_large_state_is_not_sent(capfd: pytest.CaptureFixture[str]) -> None:
    class Large(Stateful):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "more": b"\0" * 1000}

    def make(part: int, parts: int, epoch: int) -> Any:
        return Large([[1], [2], [3]], Counter())

    stream = ElasticStream(make, 1, snapshot_every=1, snapshot_bytes=500)
    change([stream], [0])
    assert [step([stream]) for _ in range(3)] == [{0: ([k], 1)} for k in (1, 2, 3)]
    assert stream.state_dict()["snapshots"] == []
    told = capfd.readouterr().err
    assert told.count("bytes, more than the 500 of snapshot_bytes") == 1


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((3, 2)), 3),
        ([np.zeros((3, 2)), np.zeros(3)], 3),
        ({"id": ["a", "b"], "x": np.zeros((2, 5))}, 2),
        (("a", "b", "c"), 3),
        ([], 0),
        ([{"x": np.float32(1)}, {"x": np.float32(2)}], 2),
    ],
)
def test_the_number_of_samples_in_a_batch(batch: Any, samples: int) -> None:
    assert samples_of(batch) == samples


# --- wrong use ---


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"make": 3}, "make is 3: need a function"),
        ({"parts": 0}, "parts is 0: need a whole number above 0, at most 65536"),
        ({"parts": 1.5}, "parts is 1.5"),
        ({"samples": 2}, "samples is 2"),
        ({"snapshot_every": 0}, "snapshot_every is 0"),
        ({"snapshot_bytes": "1M"}, "snapshot_bytes is '1M'"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        ElasticStream(**{"make": lambda *_: [], "parts": 2, **arguments})


@pytest.mark.usefixtures("world")
def test_wrong_use_is_told() -> None:
    stream = stream_of([2, 2])
    with pytest.raises(InvalidArgumentError, match="epoch is 'x'"):
        stream.set_epoch("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="no step of the stream is at hand, after 0"):
        stream.record_step()
    loop = stream.steps()
    next(loop)
    with pytest.raises(InvalidArgumentError, match=r"members is \[0, 9\], but \[9\] had no part"):
        stream.record_step([0, 9])
    with pytest.raises(InvalidArgumentError, match="step 0 of epoch 0 has not been recorded"):
        next(loop)
    with pytest.raises(InvalidArgumentError, match="has returned a int for part 0 of 1 in epoch 0"):
        next(ElasticStream(lambda *_: 3, 1).steps())  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidArgumentError, match="a batch is a set without an array"):
        next(ElasticStream(lambda *_: [{1}], 1).steps())
    with pytest.raises(InvalidArgumentError, match="samples has returned -1 for batch 0 of part 0"):
        next(ElasticStream(lambda *_: [{1}], 1, samples=lambda batch: -1).steps())


@pytest.mark.usefixtures("world")
def test_loaders_that_are_not_the_same_are_found() -> None:
    stream = stream_of([1])
    stream.load_state_dict({"epoch": 0, "steps": 3, "parts": [[3, 6, False]], "snapshots": []})
    with pytest.raises(InvalidArgumentError, match="at its end after 1 batches, but 3 have counte"):
        next(stream.steps())


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "not the state of a stream"),
        ({"epoch": 0, "steps": 0, "parts": [[0, 0]], "snapshots": []}, "not the state of a stream"),
        ({"epoch": 0, "steps": 0, "parts": [[1, 0, 0]], "snapshots": [[0, 2, {}]]}, "a snapshot"),
        ({"epoch": 0, "steps": 0, "parts": [[1, 0, 0]], "snapshots": [[1, 0, {}]]}, "IndexError"),
        ({"epoch": 0, "steps": 0, "parts": [[-1, 0, 0]], "snapshots": []}, "numbers of 0 or more"),
        ({"epoch": 0, "steps": 0, "parts": [], "snapshots": []}, "of 0 parts, but this one has 1"),
    ],
)
def test_a_wrong_state_is_told(state: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        stream_of([1]).load_state_dict(state)


def test_ranks_that_differ_are_told_alike() -> None:
    streams = [stream_of([3, 3]), stream_of([3, 3])]
    streams[1].set_epoch(1)
    talks = [stream.rounds(member) for member, stream in enumerate(streams)]
    said = [next(talk) for talk in talks]
    for talk in talks:
        with pytest.raises(MismatchError, match="rank 1's stream is at step 0 of epoch 1, of 2"):
            talk.send(list(said))
    streams = [stream_of([3, 3]), stream_of([3])]
    exchanges = [stream.exchange(member) for member, stream in enumerate(streams)]
    told = [next(exchange) for exchange in exchanges]
    for exchange in exchanges:
        with pytest.raises(MismatchError, match=r"rank 1 has a stream with \(parts,\) = \(1,\)"):
            exchange.send(list(told))
    with pytest.raises(MismatchError, match=r"rank 0 \(member 0\) reads part 1 .* dealt part None"):
        hold(streams[0].rounds(0), lambda report: [Report(0, report.at, 1, 2)])


@pytest.mark.usefixtures("world")
def test_a_place_in_another_epoch_is_left_where_ranks_go_back() -> None:
    """Both go on with the epoch of the last commit, where it was."""
    stream, sampler = stream_of([3]), ElasticSampler(range(6), 2, shuffle=False)
    batches = iter(sampler.batches())
    step([stream])
    next(batches)
    sampler.record_step()
    restore = State(stream=stream, sampler=sampler).keep()
    stream.set_epoch(1)
    sampler.set_epoch(1)
    restore()
    stream.set_epoch(0)
    sampler.set_epoch(0)
    assert next(stream.steps())[0] == [2, 3]
    assert next(iter(sampler.batches())) == [2, 3]


def test_a_loader_with_a_place_of_its_own_is_refused() -> None:
    class Loader:
        __module__ = "torchdata.stateful_dataloader.stateful_dataloader"

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class Derived(Loader):
        __module__ = "script"

    for value in (Loader(), Derived()):
        with pytest.raises(InvalidArgumentError, match=r"torchdata, .*put an elastic.ElasticStr"):
            State(loader=value)
        with pytest.raises(InvalidArgumentError, match="ElasticStream"):
            State(loaders=[value]).sync()
    with pytest.raises(InvalidArgumentError, match="has a ElasticStream within it"):
        State(streams=[stream_of([1])]).sync()

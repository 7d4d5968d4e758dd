"""Metrics of all ranks together, and evaluations without the samplers' duplicates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from forked import run_ranks
from frameworks import is_installed

import kolovod
from kolovod.data import ShardedSampler
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.metrics import Metrics, average_metrics, gather_samples
from kolovod.testing import loopback

# average_metrics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_means_are_weighted_by_samples(size):
    counts = [(5 * rank + 3) % 7 for rank in range(size)]  # 3, 1, 6, 4
    losses = [0.1 + rank for rank in range(size)]

    def work(kv):
        rank = kv.world().rank
        metrics = {"loss": losses[rank], "top1": np.float32(rank), "n": np.array([1])}
        return Metrics(kv).average_metrics(metrics, counts[rank])

    with loopback(size) as world:
        results = world.run(work)
    assert all(result == results[0] for result in results)
    assert list(results[0]) == ["loss", "top1", "n"]
    assert results[0]["loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-15)
    assert results[0]["top1"] == pytest.approx(np.average(range(size), weights=counts))
    assert results[0]["n"] == 1.0


@pytest.mark.parametrize("empty", [{"loss": math.nan, "top1": "none"}, {}, {"other": 0.0}])
def test_ranks_without_samples_count_for_nothing(empty):
    def work(kv):
        metrics = Metrics(kv)
        none = metrics.average_metrics(empty, 0)
        assert list(none) == list(empty)
        assert all(map(math.isnan, none.values()))
        if kv.world().rank == 1:
            return metrics.average_metrics({"loss": 2.0, "top1": 0.5}, 10)
        return metrics.average_metrics(empty, samples=0)

    with loopback(3) as world:
        assert world.run(work) == [{"loss": 2.0, "top1": 0.5}] * 3


def test_infinite_and_undefined_values_come_through():
    def work(kv):
        rank = kv.world().rank
        values = {"inf": math.inf if rank else 1.0, "nan": math.nan if rank else 1.0}
        return Metrics(kv).average_metrics(values)

    with loopback(2) as world:
        for result in world.run(work):
            assert result["inf"] == math.inf
            assert math.isnan(result["nan"])


def test_different_metrics_are_named_on_every_rank():
    def work(kv):
        keys = {0: ["loss", "top1"], 1: [], 2: ["loss", "top5", "f1"]}[kv.world().rank]
        text = (
            "rank 0 has 'top1', rank 2 not; rank 2 has 'f1', 'top5', rank 0 not; "
            "a rank without samples gives samples=0"
        )
        with pytest.raises(MismatchError, match=text):
            Metrics(kv).average_metrics(dict.fromkeys(keys, 1.0), len(keys))
        return Metrics(kv).average_metrics({"loss": 1.0})

    with loopback(3) as world:
        assert world.run(work) == [{"loss": 1.0}] * 3


@pytest.mark.parametrize(
    ("metrics", "samples", "text"),
    [
        ({"loss": "0.5"}, 1, "rank 1: metrics.'loss'. is '0.5': give a number"),
        ({"loss": 1j}, 1, "rank 1: metrics.'loss'. is 1j"),
        ({"loss": np.ones(2)}, 1, "rank 1: metrics.'loss'. is array"),
        ({"loss": 1.0}, -1, "rank 1: samples is -1: give a number"),
        ({"loss": 1.0}, math.nan, "rank 1: samples is nan"),
        ({"loss": 1.0}, math.inf, "rank 1: samples is inf"),
        ({"loss": 1.0}, "many", "rank 1: .*samples 'many'"),
        (0.5, 1, "rank 1: metrics is 0.5"),
        (None, 0, "rank 1: metrics is None"),
    ],
)
def test_what_cannot_be_averaged_is_an_error_on_every_rank(metrics, samples, text):
    def work(kv):
        given = (metrics, samples) if kv.world().rank == 1 else ({"loss": 1.0}, 1)
        with pytest.raises(InvalidArgumentError, match=text):
            Metrics(kv).average_metrics(*given)

    with loopback(2) as world:
        world.run(work)


# gather_samples -----------------------------------------------------------------------------------

# 10: uneven; 12: even; 3: fewer than ranks; 0: empty
LENGTHS = [0, 1, 3, 10, 12]


def rows_of(indices):
    return np.array([[i, i * i] for i in indices], np.float64).reshape(-1, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_of_a_sharded_sampler(size, pad, shuffle):
    def work(kv):
        for length in LENGTHS:
            rank = kv.world().rank
            sampler = ShardedSampler(range(length), shuffle, 1, pad, rank, size)
            sampler.set_epoch(3)
            indices = list(sampler) if shuffle else None
            found = Metrics(kv).gather_samples(rows_of(sampler), length, indices)
            np.testing.assert_array_equal(found, rows_of(range(length)))

    with loopback(size) as world:
        world.run(work)


@pytest.mark.skipif(not is_installed("torch"), reason="PyTorch is not installed")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_of_a_distributed_sampler_of_torch(size):
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    from kolovod.torch import TorchCollectives, TorchFrontend

    def work(kv):
        metrics = Metrics(TorchCollectives(kv.frontend, kv.world))
        for length in LENGTHS:
            dataset = [torch.tensor([i, i * i], dtype=torch.bfloat16) for i in range(length)]
            wanted = torch.stack(dataset) if dataset else torch.empty(0)
            for shuffle in (False, True):
                sampler = DistributedSampler(dataset, size, kv.world().rank, shuffle)
                batches = list(DataLoader(dataset, batch_size=3, sampler=sampler))
                rows = torch.cat(batches) if batches else torch.empty(0)
                found = metrics.gather_samples(rows, length, list(sampler) if shuffle else None)
                assert found.dtype == wanted.dtype
                assert torch.equal(found, wanted)

    with loopback(size, TorchFrontend()) as world:
        world.run(work)


def test_a_rank_without_rows_need_not_know_what_the_others_look_like():
    def work(kv):
        rank = kv.world().rank
        rows = rows_of([0]) if rank == 0 else np.empty(0, np.float32)
        return Metrics(kv).gather_samples(rows, 1).tolist()

    with loopback(3) as world:
        assert world.run(work) == [[[0.0, 0.0]]] * 3


ONES = np.ones(2)
# label: (what rank 1 of 2 calls, what rank 0 calls, kind and text of the error on both)
BAD_ROWS = {
    "lengths": (
        lambda m: m.gather_samples(ONES, 4),
        lambda m: m.gather_samples(ONES, 3),
        (MismatchError, "the length is 3 on rank 0, 4 on rank 1"),
    ),
    "too many rows": (
        lambda m: m.gather_samples(np.ones(3), 3),
        lambda m: m.gather_samples(ONES, 3),
        (InvalidArgumentError, "rank 1 has 3 rows, but of 3 samples on 2 ranks each has at most 2"),
    ),
    "drop_last": (
        lambda m: m.gather_samples(ONES, 6),
        lambda m: m.gather_samples(ONES, 6),
        (InvalidArgumentError, r"sample 4 \(2 of 6 are missing\).*drop_last"),
    ),
    "indices of fewer rows": (
        lambda m: m.gather_samples(ONES, 4, [1, 2, 3]),
        lambda m: m.gather_samples(ONES, 4, [0, 2]),
        (InvalidArgumentError, "rank 1: 2 rows for 3 indices"),
    ),
    "index outside": (
        lambda m: m.gather_samples(ONES, 4, [1, 4]),
        lambda m: m.gather_samples(ONES, 4, [0, 2]),
        (InvalidArgumentError, "rank 1: index 4 is not in a dataset of 4"),
    ),
    "no indices": (
        lambda m: m.gather_samples(ONES, 4, [0.5, 1]),
        lambda m: m.gather_samples(ONES, 4, [0, 2]),
        (InvalidArgumentError, "rank 1: .*float.*integer"),
    ),
    "length": (
        lambda m: m.gather_samples(ONES, -1),
        lambda m: m.gather_samples(ONES, 4),
        (InvalidArgumentError, "rank 1: length is -1"),
    ),
    "length of a dataset": (
        lambda m: m.gather_samples(ONES, "abcd"),
        lambda m: m.gather_samples(ONES, 4),
        (InvalidArgumentError, "rank 1: 'str'.*integer"),
    ),
    "scalar": (
        lambda m: m.gather_samples(np.float32(1), 4),
        lambda m: m.gather_samples(ONES, 4),
        (InvalidArgumentError, "rank 1: rows is a scalar"),
    ),
    "list": (
        lambda m: m.gather_samples([1, 2], 4),
        lambda m: m.gather_samples(ONES, 4),
        (InvalidArgumentError, "rank 1: .*list"),
    ),
    "shapes": (
        lambda m: m.gather_samples(np.ones((2, 3)), 4),
        lambda m: m.gather_samples(np.ones((2, 2)), 4),
        (MismatchError, r"rank 0 has \(2, 2\), rank 1 has \(2, 3\)"),
    ),
}


@pytest.mark.parametrize("label", BAD_ROWS)
def test_rows_that_do_not_fit_are_an_error_on_every_rank(label):
    odd, even, (kind, text) = BAD_ROWS[label]

    def work(kv):
        metrics = Metrics(kv)
        with pytest.raises(kind, match=text):
            (odd if kv.world().rank == 1 else even)(metrics)
        return metrics.gather_samples(np.full(1, kv.world().rank), 2).tolist()

    with loopback(2) as world:
        assert world.run(work) == [[0, 1]] * 2


# In the world of a process ------------------------------------------------------------------------


def evaluate(rank):
    kolovod.init()
    evens = kolovod.add_process_set([0, 2])
    mean = average_metrics({"rank": rank}, samples=rank + 1)
    sampler = ShardedSampler(range(8), shuffle=False)
    rows = gather_samples(rows_of(sampler), 8, name="rows")
    if rank == 1:
        return mean, rows.tolist()
    mean_of_set = average_metrics({"rank": rank}, rank + 1, "set", evens)
    rows_of_set = gather_samples(np.full(1, rank), 2, None, "rows", evens)
    if rank == 2:
        problem = ({}, -1)
    else:
        problem = ({}, 1)
    with pytest.raises(InvalidArgumentError, match="rank 2: samples is -1"):
        average_metrics(*problem, process_set=evens)
    return mean, rows.tolist(), mean_of_set, rows_of_set.tolist()


def test_in_real_processes_and_in_a_process_set():
    zero, one, two = run_ranks(3, evaluate)
    assert one == ({"rank": pytest.approx(8 / 6)}, rows_of(range(8)).tolist())
    assert zero == two
    assert zero[:2] == one
    assert zero[2:] == ({"rank": 1.5}, [0, 2])

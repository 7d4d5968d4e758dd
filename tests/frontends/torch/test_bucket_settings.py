"""Buckets follow the first backward of the first rank, on all ranks."""

from __future__ import annotations

import itertools
import json
import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402
from optimizing import wrapped  # noqa: E402
from torch_loopback import run  # noqa: E402

import kolovod.torch as kv  # noqa: E402
from kolovod.errors import MismatchError  # noqa: E402
from kolovod.observe.summary import read, summarize  # noqa: E402
from kolovod.torch.bucket_settings import BucketSettings  # noqa: E402

LAYERS = 12  # in the order of names the tenth comes second
HALF_A_BUCKET = 1 << 17  # elements


class Chain(torch.nn.Module):
    """Layers that are used one after the other, in any order, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.layers = torch.nn.ParameterList(torch.ones(HALF_A_BUCKET) for _ in range(LAYERS))

    def forward(self, value, order):
        for layer in order:
            value = value * self.layers[layer]
        return value.sum()


def step(net, optimizer, rank, order):
    optimizer.zero_grad()
    net(torch.full((HALF_A_BUCKET,), rank + 1.0), order).backward()
    optimizer.step()


def contents(optimizer):
    reducer = optimizer._kolovod_reducer
    names = reducer.parameters.names
    return [[names[index] for index in bucket.indices] for bucket in reducer.buckets.all]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_bucket_has_what_backward_makes_together(passes):
    def work(kv, rank):
        net = Chain()
        optimizer = wrapped(net, kv, lr=0.0, backward_passes_per_step=passes)
        order = range(LAYERS) if rank == 0 else [*range(1, LAYERS, 2), *range(0, LAYERS, 2)]
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(passes):
                net(torch.full((HALF_A_BUCKET,), rank + 1.0), order).backward()
            optimizer.step()
            assert (net.layers[7].grad == 1.5 * passes).all()
            assert net.unused.grad is None
        made = [f"layers.{layer}" for layer in reversed(range(LAYERS))]
        pairs = [made[first : first + 2] for first in range(0, LAYERS, 2)]
        assert contents(optimizer) == [*pairs, ["unused"]]

    run(2, work)


def test_all_but_the_last_are_on_their_way_when_backward_ends():
    def work(kv, rank):
        order = [*range(0, LAYERS, 2), *range(1, LAYERS, 2)]  # no neighbours by name
        net = Chain()
        optimizer = wrapped(net, kv, lr=0.0)
        step(net, optimizer, rank, order)
        sent = []
        reducer = optimizer._kolovod_reducer
        handles = [  # called after the optimizer's own
            layer.register_post_accumulate_grad_hook(lambda _: sent.append(len(reducer.in_flight)))
            for layer in net.layers
        ]
        step(net, optimizer, rank, order)
        for handle in handles:
            handle.remove()
        assert sent == [number // 2 for number in range(1, LAYERS + 1)]

    run(2, work)


def test_a_group_of_the_users_leaves_when_its_last_gradient_is_there():
    def work(kv, rank):
        net = Chain()
        groups = [[net.layers[11], net.layers[0]]]
        optimizer = wrapped(net, kv, lr=0.0, groups=groups)
        step(net, optimizer, rank, range(LAYERS))
        found = contents(optimizer)
        assert found[0] == ["layers.11", "layers.0"]
        assert found[1] == ["layers.10", "layers.9"]

    run(2, work)


@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_buckets_are_cut_anew_when_the_link_is_another(kind, monkeypatch):
    """By what the first rank knows of it, and between two steps; not where buckets have a state."""
    rates = {0: [125.0, 125.0, 12.5, 12.5, 1e4, 1e4], 1: [1e4] * 6}
    asked = {0: 0, 1: 0}

    def link(bucket_settings):
        rank = bucket_settings._verbs.world().rank
        return rates[rank][asked[rank]], bucket_settings._parameters.bytes

    monkeypatch.setattr(BucketSettings, "_link", link)

    def work(kv, rank):
        net = Chain()
        optimizer = wrapped(net, kv, lr=0.0, shard_state=kind == "shards")
        found = []
        for number in range(6):
            asked[rank] = number
            step(net, optimizer, rank, range(LAYERS))
            if kind == "plain":
                assert all((layer.grad == 1.5).all() for layer in net.layers)
                assert net.unused.grad is None
            found.append([len(bucket) for bucket in contents(optimizer)])
            reducer = optimizer._kolovod_reducer
            assert len(reducer.in_flight) == 0
            assert all(b.missing == len(b.indices) for b in reducer.buckets.all)
        return found

    pairs, single = [2] * (LAYERS // 2) + [1], [1] * (LAYERS + 1)
    wanted = [pairs, pairs, single, single, pairs, pairs]  # the last: six MiB in all
    for found in run(2, work):
        assert found == (wanted if kind == "plain" else [pairs] * 6)


def tuned(rank, log):
    os.environ["KOLOVOD_AUTOTUNE"] = "1"
    os.environ["KOLOVOD_AUTOTUNE_LOG_FILE"] = log
    os.environ["KOLOVOD_TIMELINE"] = f"{log}.json"
    kv.init()
    net = Chain()
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
    )
    sizes = []
    for _ in range(80):
        step(net, optimizer, rank, range(LAYERS))
        assert all((layer.grad == 1.5).all() for layer in net.layers)
        sizes.append(optimizer._kolovod_reducer.buckets.bucket_bytes)
    kv.shutdown()
    return sizes


def test_bucket_sizes_are_tried_when_asked_for(tmp_path):
    log = tmp_path / "tune.log"
    first, second = run_torch_ranks(2, tuned, str(log))
    assert first == second
    decisions = [json.loads(line) for line in log.read_text().splitlines()]
    assert decisions[0]["bucket_bytes"] == [1 << 20, 4 << 20]
    assert first[-1] == decisions[-1]["chosen"]
    assert len(set(first)) == len(decisions) + 1
    choices = [what for _, what in summarize(read(tmp_path / "tune.log.json")).choices]
    assert choices[0] == "buckets of 1024 KiB: ranks are on one host"
    assert len(choices) == len(decisions) + 1
    assert choices[-1].startswith(f"buckets of {first[-1] >> 10} KiB: ")
    assert " ms a step, " in choices[-1]


def chosen(rank, log, most, hosts):
    """``hosts``: of each rank, where links carry 10 MB/s, and then a hundred times as much."""
    os.environ["KOLOVOD_COMPRESSION"] = f"auto:{most}"
    os.environ["KOLOVOD_AUTOTUNE_LOG_FILE"] = log
    kv.init()
    rates = iter([10.0] * 20 + [1e5] * 1000)
    BucketSettings._link = lambda bucket_settings: (next(rates), bucket_settings._parameters.bytes)
    BucketSettings._hosts = lambda bucket_settings: hosts
    net = Chain()
    optimizer = kv.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
    )
    sent = []
    for _ in range(60):
        step(net, optimizer, rank, range(LAYERS))
        assert all((layer.grad == 1.5).all() for layer in net.layers)
        sender = optimizer._kolovod_reducer.sender
        sent.append(repr(sender._blocks) if sender._blocks else sender._compressor.given.__name__)
    kv.shutdown()
    return sent


@pytest.mark.parametrize(
    ("most", "ways"),
    [
        ("int8", ["NoneCompressor", "Compression.int8", "NoneCompressor"]),
        ("bf16", ["NoneCompressor", "BF16Compressor", "NoneCompressor"]),
    ],
)
def test_compression_is_chosen_by_the_link_and_backward(tmp_path, most, ways):
    log = tmp_path / "chosen.log"
    first, second = run_torch_ranks(2, chosen, str(log), most, 2)
    assert first == second
    assert [way for way, _ in itertools.groupby(first)] == ways
    decisions = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["compression"] for each in decisions] == [most, "none"]
    assert " ms of backward" in decisions[0]["why"]


def test_nothing_is_compressed_on_one_host(tmp_path):
    for found in run_torch_ranks(2, chosen, str(tmp_path / "none.log"), "int4", 1):
        assert set(found) == {"NoneCompressor"}


def test_ranks_that_choose_from_others_are_named():
    def work(loopback, rank):
        net = Chain()
        compression = kv.Compression.auto("int8" if rank == 0 else "bf16")
        optimizer = wrapped(net, loopback, lr=0.0, compression=compression)
        with pytest.raises(MismatchError) as caught:
            step(net, optimizer, rank, range(LAYERS))
        return str(caught.value)

    for said in run(2, work):
        assert "rank 0 has 'compression' one of none, bf16, int8, rank 1 has 'compression'" in said

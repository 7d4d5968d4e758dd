"""Encoding between hosts: what an allreduce gives, for whom, and what it is refused for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from blocks import reduced
from forked import run_ranks, run_torch_ranks

import kolovod
from kolovod import Compression
from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.errors import InvalidArgumentError, MismatchError
from kolovod.testing.loopback import loopback

WORLDS = (["a", "b"], ["a", "a", "b"], ["a", "b", "a", "c", "b"])
CODECS = ("int8", "int4")


def values(rank, count=5_000, seed=0):
    draw = np.random.default_rng([rank, seed])
    return (draw.normal(size=count) * 10.0 ** draw.integers(-3, 3)).astype(np.float32)


def encoded(rank, hosts):
    kolovod.init()
    size = kolovod.size()
    for name in CODECS:
        codec = getattr(Compression, name)
        for count in (1_024, 1_025, 70_000):
            everyone = [values(r, count) for r in range(size)]
            mine = everyone[rank]
            total = kolovod.allreduce(mine, op=Sum, compression=codec)
            assert np.array_equal(total, reduced(everyone, hosts, name))
            again = kolovod.allreduce(mine, f"named {count}", Average, compression=codec)
            assert np.array_equal(again, reduced(everyone, hosts, name, size))
            assert np.array_equal(mine, everyone[rank])
            assert kolovod.allreduce_(mine, op=Sum, compression=codec) is mine
            assert np.array_equal(mine, total)
        check_groups(rank, size, name)
        check_sizes_and_dtypes(rank, size, hosts, name)
    kolovod.barrier()
    kolovod.shutdown()
    return True


def check_groups(rank, size, name):
    """The same bits in whatever company, and each tensor by its own codec."""
    codec = getattr(Compression, name)
    tensors = [values(rank, count, 1) for count in (2_000, 3, 9_999, 1_024)]
    alone = [kolovod.allreduce(tensor, op=Sum, compression=codec) for tensor in tensors]
    together = kolovod.grouped_allreduce(tensors, op=Sum, compression=codec)
    handles = [kolovod.allreduce_async(t, op=Sum, compression=codec) for t in tensors]
    for one, other, handle in zip(alone, together, handles, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one, handle.wait())
    mixed = kolovod.grouped_allreduce(
        tensors, op=Sum, compression=[codec, codec, Compression.none, codec]
    )
    exact = kolovod.allreduce(tensors[2], op=Sum)
    assert np.array_equal(mixed[2], exact)
    assert not np.array_equal(exact, alone[2])
    assert np.array_equal(mixed[3], alone[3])


def check_sizes_and_dtypes(rank, size, hosts, name):
    """What is small, or no float, is sent as it is; 16 bits are encoded like 32."""
    codec = getattr(Compression, name)
    small = values(rank, 1_023)
    assert np.array_equal(
        kolovod.allreduce(small, op=Sum, compression=codec), kolovod.allreduce(small, op=Sum)
    )
    whole = np.arange(4_000) * (rank + 1)
    total = size * (size + 1) // 2
    assert np.array_equal(
        kolovod.allreduce(whole, op=Sum, compression=codec), np.arange(4_000) * total
    )
    wide = values(rank).astype(np.float64)
    assert np.array_equal(
        kolovod.allreduce(wide, op=Sum, compression=codec), kolovod.allreduce(wide, op=Sum)
    )
    halves = [values(r).astype(np.float16) for r in range(size)]
    half = kolovod.allreduce(halves[rank], op=Sum, compression=codec)
    assert half.dtype == np.float16
    if len(set(hosts)) == size:  # else sums within hosts are rounded to 16 bits, too
        assert np.array_equal(half, reduced(halves, hosts, name).astype(np.float16))


@pytest.mark.parametrize("hosts", WORLDS, ids="".join)
def test_a_sum_of_encoded_sums(hosts):
    assert all(run_ranks(len(hosts), encoded, hosts, hosts=hosts))


def test_within_a_host_nothing_is_encoded():
    with loopback(3) as world:

        def work(verbs):
            mine = values(verbs.world().rank)
            exact = verbs.allreduce(mine, "a", Sum)
            return np.array_equal(
                verbs.allreduce(mine, "b", Sum, compression=Compression.int4), exact
            )

        assert all(world.run(work))


def told(rank, folder):
    kolovod.init()
    with open(f"{folder}/{rank}", "w") as file, contextlib.redirect_stderr(file):
        for _ in range(2):
            kolovod.allreduce(values(rank), compression=Compression.int8)
    kolovod.barrier()
    kolovod.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_where_it_does_nothing_it_says_so_once(hosts, tmp_path):
    run_ranks(2, told, str(tmp_path), hosts=list(hosts))
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts[1] == ""
    assert texts[0].count("\n") == (hosts == "aa")
    assert ("compression changes nothing here: all 2 ranks are on host a" in texts[0]) == (
        hosts == "aa"
    )


def not_finite(rank):
    kolovod.init()
    mine = values(rank)
    mine[7] = np.inf if rank == 0 else 1.0
    mine[300] = np.nan if rank == 1 else 1.0
    mine[301] = -np.inf
    for codec in (Compression.int8, Compression.int4):
        total = kolovod.allreduce(mine, op=Sum, compression=codec)
        assert total[7] == np.inf
        assert np.isnan(total[300])
        assert total[301] == -np.inf
        assert np.isfinite(np.delete(total, [7, 300, 301])).all()
    kolovod.shutdown()
    return True


def test_what_is_not_finite_is_found_by_a_scaler():
    assert all(run_ranks(2, not_finite, hosts=["a", "b"]))


def in_a_set_and_after_a_join(rank):
    kolovod.init()
    pair = kolovod.add_process_set([0, 2])
    if rank != 1:
        mine = [values(r) for r in (0, 2)]
        total = kolovod.allreduce(
            values(rank), "set", Sum, process_set=pair, compression=Compression.int8
        )
        assert np.array_equal(total, reduced(mine, "ab", "int8"))
    if rank == 1:
        return kolovod.join()
    # Rank 1, of the first host, gives zeros.
    total = kolovod.allreduce(values(rank), "after", Sum, compression=Compression.int4)
    everyone = [values(0), np.zeros(5_000, np.float32), values(2)]
    assert np.array_equal(total, reduced(everyone, "aab", "int4"))
    return kolovod.join()


def test_process_sets_and_ranks_that_have_joined():
    run_ranks(3, in_a_set_and_after_a_join, hosts=["a", "a", "b"])


def refused(rank):
    kolovod.init()
    mine = values(rank)
    int8 = Compression.int8
    for op in (Max, Adasum):
        with pytest.raises(InvalidArgumentError, match=rf"int8 is for .* not for op {op.name}"):
            kolovod.allreduce(mine, op=op, compression=int8)
    with pytest.raises(InvalidArgumentError, match=r"takes Compression.none, .int8 or .int4"):
        kolovod.allreduce(mine, compression=Compression.fp16)
    with pytest.raises(InvalidArgumentError, match="2 items for 3 tensors"):
        kolovod.grouped_allreduce([mine] * 3, compression=[int8, int8])
    own = int8 if rank == 1 else Compression.none
    with pytest.raises(
        MismatchError, match=r"compression differs: rank 0 has none, rank 1 has int8"
    ):
        kolovod.allreduce(mine, "differs", compression=own)
    several = [int8, Compression.int4 if rank == 1 else int8]
    with pytest.raises(MismatchError, match=r"compression of tensor 1 of the group differs"):
        kolovod.grouped_allreduce([mine, mine.copy()], "group", compression=several)
    kolovod.barrier()
    kolovod.shutdown()
    return True


def test_what_is_refused():
    assert all(run_ranks(2, refused, hosts=["a", "b"]))


def foreign(rank):
    kolovod.init()
    with pytest.raises(InvalidArgumentError, match=r"int8 is done by Kolovod's own engine, but"):
        kolovod.allreduce(values(rank), compression=Compression.int8)
    kolovod.barrier()
    kolovod.shutdown()
    return True


@pytest.mark.frameworks
def test_another_engine_refuses():
    pytest.importorskip("torch", reason="PyTorch, whose gloo is used, is not installed")
    assert all(run_torch_ranks(2, foreign, env={"KOLOVOD_BACKEND": "gloo"}))

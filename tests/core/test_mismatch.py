"""A disagreement of ranks fails on every rank, names values and ranks, and breaks nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
from forked import run_ranks

from kolovod.core.ops import Adasum, Average, Max, Sum
from kolovod.errors import DuplicateNameError, InvalidArgumentError, MismatchError
from kolovod.testing.loopback import loopback

# label: (what rank 1 of 3 does, what the others do, texts that every rank's error contains)
MISMATCHES = {
    "dtype": (
        lambda kv: kv.allreduce(np.ones(3, np.float32), "t"),
        lambda kv: kv.allreduce(np.ones(3, np.float64), "t"),
        ["dtype", "rank 0 has float64", "rank 1 has float32"],
    ),
    "shape": (
        lambda kv: kv.allreduce(np.ones((2, 3)), "t"),
        lambda kv: kv.allreduce(np.ones((3, 2)), "t"),
        ["shape", "rank 0 has (3, 2)", "rank 1 has (2, 3)"],
    ),
    "ndim": (
        lambda kv: kv.allreduce(np.ones(()), "t"),
        lambda kv: kv.allreduce(np.ones(1), "t"),
        ["shape", "rank 0 has (1,)", "rank 1 has ()"],
    ),
    "op": (
        lambda kv: kv.allreduce(np.ones(3), "t", Sum),
        lambda kv: kv.allreduce(np.ones(3), "t", Max),
        ["op", "rank 0 has Max", "rank 1 has Sum"],
    ),
    "prescale": (
        lambda kv: kv.allreduce(np.ones(3), "t", Sum, 0.5),
        lambda kv: kv.allreduce(np.ones(3), "t", Sum, 0.25),
        ["prescale", "rank 0 has 0.25", "rank 1 has 0.5"],
    ),
    "postscale": (
        lambda kv: kv.allreduce(np.ones(3), "t", Average, 1.0, 2.0),
        lambda kv: kv.allreduce(np.ones(3), "t"),
        ["postscale", "rank 0 has 1", "rank 1 has 2"],
    ),
    "verb": (
        lambda kv: kv.broadcast(np.ones(3), 0, "t"),
        lambda kv: kv.allreduce(np.ones(3), "t"),
        ["rank 0 has allreduce", "rank 1 has broadcast"],
    ),
    "root": (
        lambda kv: kv.broadcast(np.ones(3), 2, "t"),
        lambda kv: kv.broadcast(np.ones(3), 0, "t"),
        ["root", "rank 0 has 0", "rank 1 has 2"],
    ),
    "broadcast shape": (
        lambda kv: kv.broadcast_(np.ones(4), 0, "t"),
        lambda kv: kv.broadcast_(np.ones(3), 0, "t"),
        ["shape", "rank 0 has (3,)", "rank 1 has (4,)"],
    ),
    "allgather tail": (
        lambda kv: kv.allgather(np.ones((2, 4)), "t"),
        lambda kv: kv.allgather(np.ones((2, 3)), "t"),
        ["shape", "rank 0 has (2, 3)", "rank 1 has (2, 4)"],
    ),
    "alltoall tail": (
        lambda kv: kv.alltoall(np.ones((3, 4)), None, "t"),
        lambda kv: kv.alltoall(np.ones((6, 3)), None, "t"),
        ["shape", "rank 0 has (6, 3)", "rank 1 has (3, 4)"],
    ),
    "reducescatter rows": (
        lambda kv: kv.reducescatter(np.ones((4, 2)), "t"),
        lambda kv: kv.reducescatter(np.ones((3, 2)), "t"),
        ["shape", "rank 0 has (3, 2)", "rank 1 has (4, 2)"],
    ),
    "reducescatter op": (
        lambda kv: kv.reducescatter(np.ones(3), "t", Sum),
        lambda kv: kv.reducescatter(np.ones(3), "t", Max),
        ["op", "rank 0 has Max", "rank 1 has Sum"],
    ),
    "group size": (
        lambda kv: kv.grouped_allreduce([np.ones(3)], "t"),
        lambda kv: kv.grouped_allreduce([np.ones(3), np.ones(2)], "t"),
        ["number of tensors", "rank 0 has 2", "rank 1 has 1"],
    ),
    "group member": (
        lambda kv: kv.grouped_allreduce_([np.ones(3), np.ones(2, "i4")], "t"),
        lambda kv: kv.grouped_allreduce_([np.ones(3), np.ones(2)], "t"),
        ["dtype of tensor 1", "rank 0 has float64", "rank 1 has int32"],
    ),
}


def assert_usable(kv):
    """The name that failed, another name and a barrier all work."""
    for name in ("t", "another"):
        assert kv.allreduce(np.full(2, kv.world().rank), name, Sum).tolist() == [3, 3]
    kv.barrier()


def check_mismatch(kv, label, times):
    odd, even, texts = MISMATCHES[label]
    for _ in range(times):
        with pytest.raises(MismatchError) as caught:
            (odd if kv.world().rank == 1 else even)(kv)
        for text in [*texts, "'t'"]:
            assert text in str(caught.value)
    assert_usable(kv)


@pytest.mark.parametrize("label", MISMATCHES)
def test_every_rank_fails_alike_and_the_engine_stays_usable(label):
    with loopback(3) as world:
        world.run(lambda kv: check_mismatch(kv, label, times=3))


def test_asynchronous_mismatch_is_raised_by_wait():
    with loopback(3) as world:

        def work(kv):
            rank = kv.world().rank
            good = kv.allreduce_async(np.ones(3), "good", Sum)
            bad = kv.allreduce_async(np.ones(3 + rank), "bad", Sum)
            with pytest.raises(MismatchError, match=re.escape("rank 0 has (3,), rank 1 has (4,)")):
                bad.wait()
            assert good.wait().tolist() == [3, 3, 3]

        world.run(work)


def test_a_name_that_changes_is_no_mismatch_when_all_ranks_change_it():
    """Also when it was announced by one bit before, and when ranks change at different moments."""
    with loopback(3) as world:

        def work(kv):
            for turn in range(12):
                size = 1 + turn // 4
                assert kv.allreduce(np.ones(size), "t", Sum).tolist() == [3.0] * size

        world.run(work)


def test_one_rank_changes_a_name_that_was_announced_by_one_bit():
    with loopback(3) as world:

        def work(kv):
            for _ in range(5):
                kv.allreduce(np.ones(4), "t", Sum)
            with pytest.raises(MismatchError, match=re.escape("rank 2 has (5,)")):
                kv.allreduce(np.ones(4 + kv.world().rank // 2), "t", Sum)
            for _ in range(5):
                assert kv.allreduce(np.ones(4), "t", Sum).tolist() == [3.0] * 4

        world.run(work)


def test_duplicate_name_fails_at_once_where_it_was_made():
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:
                kv.barrier("go")
                return kv.allreduce(np.ones(2), "twice", Sum)
            first = kv.allreduce_async(np.ones(2), "twice", Sum)
            for verb in (kv.allreduce_async, kv.allgather_async, kv.broadcast_async, kv.allreduce):
                with pytest.raises(DuplicateNameError, match=r"'twice' .* rank 0"):
                    verb(np.ones(2), name="twice")
            kv.barrier("go")
            return first.wait()

        assert [r.tolist() for r in world.run(work)] == [[2, 2], [2, 2]]


def same_tensor_twice(kv):
    x = np.ones(3)
    kv.grouped_allreduce_([x, np.ones(2), x], op=Sum)


def overlapping_tensors(kv):
    x = np.ones(10)
    kv.grouped_allreduce_([x[3:], x[:4]], op=Sum)


BAD_CALLS = {
    "root too large": (lambda kv: kv.broadcast(np.ones(2), 7), "root rank 7.*0..1"),
    "root negative": (lambda kv: kv.broadcast(np.ones(2), -1), "root rank -1"),
    "root too large for C": (lambda kv: kv.broadcast(np.ones(2), 2**40), "root_rank is 109951"),
    "name not unicode": (
        lambda kv: kv.allreduce(np.ones(2), "\ud800"),
        "cannot be written in UTF-8",
    ),
    "name of the engine": (lambda kv: kv.allreduce(np.ones(2), "unnamed.8"), "the engine's own"),
    "factor not finite": (
        lambda kv: kv.allreduce(np.ones(2), postscale_factor=float("nan")),
        "a factor is nan",
    ),
    "a tensor twice": (same_tensor_twice, "tensors 0 and 2 of the group share memory"),
    "overlapping tensors": (overlapping_tensors, "tensors 0 and 1 of the group share memory"),
    "unnamed is numbered": (lambda kv: kv.broadcast(np.ones(2), 7), "'unnamed.1': root rank 7"),
    "root no number": (lambda kv: kv.broadcast(np.ones(2), "one"), "root_rank is 'one'"),
    "name": (lambda kv: kv.allreduce(np.ones(2), 5), "name is 5"),
    "op number": (lambda kv: kv.allreduce(np.ones(2), op=99), "op is 99.*Average"),
    "op text": (lambda kv: kv.allreduce(np.ones(2), op="sum"), "op is 'sum'.*Average"),
    "adasum of integers": (
        lambda kv: kv.allreduce(np.ones(2, int), op=Adasum),
        "Adasum needs a floating dtype, not int64",
    ),
    "adasum scattered": (
        lambda kv: kv.reducescatter(np.ones(2), op=Adasum),
        "Adasum is for allreduce only",
    ),
    "factor": (lambda kv: kv.allreduce(np.ones(2), prescale_factor="x"), "prescale_factor is 'x'"),
    "scalar allgather": (lambda kv: kv.allgather(np.ones(())), r"reshape it to \(1,\)"),
    "scalar alltoall": (lambda kv: kv.alltoall(np.ones(())), r"reshape it to \(1,\)"),
    "scalar reducescatter": (lambda kv: kv.reducescatter(np.ones(())), r"reshape it to \(1,\)"),
    "rows not divisible": (lambda kv: kv.alltoall(np.ones(3)), "3 rows cannot be split evenly"),
    "number of splits": (lambda kv: kv.alltoall(np.ones(3), [3]), "1 splits for 2 ranks"),
    "splits too large": (lambda kv: kv.alltoall(np.ones(3), [2, 2]), "split 2 for rank 1, but 1"),
    "split negative": (lambda kv: kv.alltoall(np.ones(3), [-1, 2]), "split -1 for rank 0"),
    "split no number": (lambda kv: kv.alltoall(np.ones(3), [1, 0.5]), "splits is .*whole number"),
    "bool scattered": (lambda kv: kv.reducescatter(np.ones(2, bool)), "bool cannot be averaged"),
    "gathered group": (lambda kv: kv.grouped_allgather(np.ones(2)), "list or tuple.*ndarray"),
    "bool average": (lambda kv: kv.allreduce(np.ones(2, bool)), "bool cannot be averaged"),
    "complex": (lambda kv: kv.allreduce(np.ones(2, complex), op=Max), "combined by Sum or Average"),
    "mean beyond int64": (
        lambda kv: kv.allreduce(np.array([1, 2**62 + 1])),
        "4611686018427387905 is too large for an Average of int64 over 2 ranks",
    ),
    "byte order": (lambda kv: kv.allreduce(np.ones(2, ">f4")), ">f4 is not supported"),
    "object": (lambda kv: kv.allreduce(np.array([None])), "object is not supported"),
    "list": (lambda kv: kv.allreduce([1, 2]), "not list"),
    "text": (lambda kv: kv.broadcast_("text"), "str cannot be changed in place"),
    "masked": (lambda kv: kv.allreduce(np.ma.ones(2)), "MaskedArray"),
    "number in place": (lambda kv: kv.allreduce_(1.0), "float cannot be changed in place"),
    "group": (lambda kv: kv.grouped_allreduce(np.ones(2)), "list or tuple.*ndarray"),
    "read-only": (lambda kv: kv.allreduce_(np.frombuffer(b"1234", "i4")), "read-only"),
}


@pytest.mark.parametrize("label", BAD_CALLS)
def test_bad_arguments_fail_where_they_are_made(label):
    call, text = BAD_CALLS[label]
    with loopback(2) as world:

        def work(kv):
            if kv.world().rank == 1:  # rank 0 does nothing wrong, and is not disturbed
                with pytest.raises(InvalidArgumentError, match=text):
                    call(kv)
            return kv.allreduce(np.ones(2), "after", Sum).tolist()

        assert world.run(work) == [[2, 2], [2, 2]]


def test_tensors_of_a_group_may_touch_and_inputs_may_be_the_same():
    with loopback(2) as world:

        def work(kv):
            x = np.ones(10)
            kv.grouped_allreduce_([x[:4], x[4:], x[4:4]], op=Sum)
            assert x.tolist() == [2] * 10
            y, z = kv.grouped_allreduce([x, x], op=Sum)
            assert y.tolist() == z.tolist() == [4] * 10

        world.run(work)


def on_a_real_rank(rank):
    import kolovod
    from kolovod.numpy import collectives as on_numpy

    kolovod.init()
    for label in ("dtype", "shape", "op", "root", "prescale"):
        check_mismatch(on_numpy, label, times=2)
    pending = kolovod.allreduce_async(np.ones(2), f"only on rank {rank}")
    with pytest.raises(DuplicateNameError, match=f"rank {rank}"):
        kolovod.allreduce_async(np.ones(2), f"only on rank {rank}")
    kolovod.barrier()
    assert not pending.poll()
    kolovod.barrier()
    others = [r for r in range(3) if r != rank]
    handles = [kolovod.allreduce_async(np.ones(2), f"only on rank {r}") for r in others]
    return [handle.wait().tolist() for handle in [pending, *handles]]


def test_real_processes():
    assert run_ranks(3, on_a_real_rank) == [[[1, 1]] * 3] * 3

"""What the native engine promises beyond conformance: exact order of addition, chunks, limits."""

from __future__ import annotations

import conformance
import numpy as np
import psutil
import pytest
from conformance import check_adasum, check_allreduce, check_alltoall, check_reducescatter

from kolovod.core.ops import Average, Max, Min, Product, Sum
from kolovod.testing.loopback import loopback

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_allreduce_of_several_chunks(size, dtype):
    modes = ((True, False), (False, True))
    with loopback(size, config={"chunk_bytes": 1 << 16}) as world:

        def work(kv):
            for case in conformance.reductions(dtype, conformance.LARGE, modes):
                check_allreduce(kv, "numpy", case)

        world.run(work)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_alltoall_and_reducescatter_of_several_chunks(size, dtype):
    with loopback(size, config={"chunk_bytes": 1 << 12}) as world:

        def work(kv):
            check_alltoall(kv, "numpy", dtype, scale=1111)
            for case in conformance.reductions(dtype, ((10_007,), (3, 5_000)), ((False, False),)):
                check_reducescatter(kv, "numpy", case)

        world.run(work)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("size", [2, 4])
def test_adasum_of_several_chunks(size, dtype):
    with loopback(size, config={"chunk_bytes": 1 << 12}) as world:
        world.run(lambda kv: check_adasum(kv, "numpy", dtype))


def test_verbs_follow_each_other_in_any_mix():
    """Slots of staging are handed from verb to verb; sizes around a chunk, and above."""
    with loopback(3, config={"chunk_bytes": 1 << 12}) as world:

        def work(kv):
            rank = kv.world().rank
            draw = np.random.default_rng(7)  # the same on every rank
            for turn in range(300):
                rows = int(draw.choice([0, 1, 3, 170, 1024, 9000]))
                x = np.arange(rows, dtype=np.float32) + rank
                total = 3 * np.arange(rows, dtype=np.float32) + 3
                verb = draw.integers(5)
                if verb == 0:
                    assert (kv.allreduce(x, op=Sum) == total).all(), turn
                elif verb == 1:
                    assert (kv.broadcast(x, 1) == np.arange(rows) + 1).all(), turn
                elif verb == 2:
                    assert (kv.allgather(x)[-rows or rows :] == np.arange(rows) + 2).all(), turn
                elif verb == 3:
                    part = kv.reducescatter(x, op=Sum)
                    assert (part == np.array_split(total, 3)[rank]).all(), turn
                else:
                    splits = [rows // 2, 0, rows // 3]
                    got, received = kv.alltoall(x, splits)
                    assert received == [splits[rank]] * 3
                    start = sum(splits[:rank])
                    own = np.arange(rows, dtype=np.float32)[start : start + splits[rank]]
                    assert (got == np.concatenate([own, own + 1, own + 2])).all(), turn

        world.run(work)


@pytest.mark.parametrize("size", SIZES)
def test_barrier_waits_for_everybody(size):
    with loopback(size) as world:
        arrived = []

        def work(kv):
            for turn in range(20):
                arrived.append(turn)
                kv.barrier()
                assert arrived.count(turn) == size
                kv.barrier("named")

        world.run(work)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", conformance.OPS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_floats_are_added_in_rank_order_and_rounded_once(size, op, dtype):
    """Bitwise what NumPy gives for ((a0 op a1) op a2) ...; float16 computed in float32."""
    inputs = [np.random.default_rng(rank).normal(size=4099).astype(dtype) for rank in range(size)]
    wide = np.float32 if dtype == "float16" else dtype
    total = inputs[0].astype(wide)
    for values in inputs[1:]:
        functions = {Min: np.minimum, Max: np.maximum, Product: np.multiply}
        total = functions.get(op, np.add)(total, values.astype(wide))
    if op == Average:
        total = total / np.dtype(wide).type(size)
    with loopback(size) as world:
        results = world.run(lambda kv: kv.allreduce(inputs[kv.world().rank], "x", op))
    for result in results:
        np.testing.assert_array_equal(result, total.astype(dtype))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_integer_average_truncates_toward_zero(size):
    inputs = [np.array([-7, -1, 1, 7, 100 + rank], np.int32) for rank in range(size)]
    total = np.sum(inputs, axis=0)
    wanted = (np.abs(total) // size) * np.sign(total)
    with loopback(size) as world:
        for result in world.run(lambda kv: kv.allreduce(inputs[kv.world().rank])):
            np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_of_an_integer_average_does_not_wrap(size, dtype):
    limits = np.iinfo(dtype)
    values = np.array([limits.max, limits.min, limits.max - 3], dtype)
    with loopback(size) as world:
        for result in world.run(lambda kv: kv.allreduce(values)):
            np.testing.assert_array_equal(result, values)
        for result in world.run(lambda kv: kv.allreduce(values, postscale_factor=2.0)):
            np.testing.assert_array_equal(result, [limits.max, limits.min * 2 // 2, limits.max])


def test_sums_of_integers_are_exact_beyond_the_mantissa_of_a_double():
    inputs = [np.array([2**62 - 1, -(2**62) + 3], np.int64), np.array([12, -8], np.int64)]
    with loopback(2) as world:
        sums = world.run(lambda kv: kv.allreduce(inputs[kv.world().rank], op=Sum))
        averages = world.run(lambda kv: kv.allreduce(inputs[kv.world().rank]))
    np.testing.assert_array_equal(sums[1], [2**62 + 11, -(2**62) - 5])
    np.testing.assert_array_equal(averages[0], [(2**62 + 11) // 2, -((2**62 + 5) // 2)])


@pytest.mark.parametrize("op", [Min, Max])
def test_a_nan_on_any_rank_is_the_minimum_and_maximum_on_all(op):
    values = [np.array([1.0, np.nan, 2.0]), np.array([np.nan, 3.0, 1.0])]
    with loopback(2) as world:
        for result in world.run(lambda kv: kv.allreduce(values[kv.world().rank], op=op)):
            np.testing.assert_array_equal(np.isnan(result), [True, True, False])


def test_python_numbers_and_numpy_scalars_become_zero_dimensional():
    with loopback(3) as world:

        def work(kv):
            rank = kv.world().rank
            return kv.allreduce(rank + 0.5), kv.allreduce(np.float32(rank)), kv.allreduce(rank)

        for mean, single, whole in world.run(work):
            assert (mean.shape, mean.dtype, float(mean)) == ((), np.float64, 1.5)
            assert (single.shape, single.dtype, float(single)) == ((), np.float32, 1.0)
            assert (whole.shape, whole.dtype, int(whole)) == ((), np.int64, 1)


def test_any_order_of_submission_works():
    names = [f"t{i}" for i in range(40)]
    with loopback(3) as world:

        def work(kv):
            rank = kv.world().rank
            for step in range(4):  # later steps announce by one bit
                order = np.random.default_rng([rank, step]).permutation(len(names))
                handles = {i: kv.allreduce_async(np.full(3, i), names[i], Sum) for i in order}
                for i in reversed(order):
                    np.testing.assert_array_equal(handles[i].wait(), np.full(3, 3 * i))

        world.run(work)


def test_results_are_bitwise_equal_when_fused_differently():
    """The order of addition does not depend on bucket, offset or chunk."""
    inputs = [np.random.default_rng(rank).normal(size=50_000).astype("f4") for rank in range(3)]
    with loopback(3) as world:

        def work(kv):
            mine = inputs[kv.world().rank]
            alone = kv.allreduce(mine, "whole")
            parts = np.array_split(mine, 37)
            handles = [kv.allreduce_async(part, f"part{i}") for i, part in enumerate(parts)]
            return alone, np.concatenate([handle.wait() for handle in handles])

        for alone, parts in world.run(work):
            np.testing.assert_array_equal(alone, parts)


@pytest.mark.slow
@pytest.mark.thorough
def test_more_than_two_to_the_31_bytes():
    count = 2**31 + 4099
    if psutil.virtual_memory().available < 3.5 * count:
        pytest.skip("needs 7 GiB of free memory")
    with loopback(2) as world:

        def work(kv):
            rank = kv.world().rank
            array = np.zeros(count, np.uint8)
            array[[0, 2**31 - 1, 2**31, count - 1]] = [rank + 1, 10, 20 + rank, 30]
            kv.allreduce_(array, "large", Sum)
            assert array[[0, 1, 2**31 - 1, 2**31, count - 1]].tolist() == [3, 0, 20, 41, 60]
            array[count - 1] = rank
            kv.broadcast_(array, 1, "large too")
            assert array[count - 1] == 1

        world.run(work, timeout_s=100)

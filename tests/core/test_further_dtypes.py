"""Dtypes that the engine sees as others: what works comes to the same, what cannot is said."""

from __future__ import annotations

import numpy as np
import pytest

from kolovod.core.ops import Adasum, Average, Max, Min, Product, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.testing.loopback import loopback

COMPLEX = [np.complex64, np.complex128]
UNSIGNED = [np.uint32, np.uint64]
try:  # NumPy has none of its own
    import ml_dtypes

    BITS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
except ImportError:
    BITS = []
SIZE = 3


def values(dtype, rank, shape=(2, 3)):
    """Large where the sign of another dtype would matter."""
    numbers = np.arange(np.prod(shape)).reshape(shape) + rank + 1
    if np.issubdtype(dtype, np.complexfloating):
        return (numbers * (1 + 2j)).astype(dtype)
    if dtype in UNSIGNED:
        return np.iinfo(dtype).max - numbers.astype(dtype)
    return numbers.astype(dtype)


def on_ranks(work):
    with loopback(SIZE) as world:
        return world.run(lambda kv: work(kv, kv.world().rank))


@pytest.mark.parametrize("dtype", COMPLEX + UNSIGNED + BITS)
def test_they_can_be_sent(dtype):
    def work(kv, rank):
        mine = values(dtype, rank)
        everyone = np.concatenate([values(dtype, r) for r in range(SIZE)])
        for got, wanted in (
            (kv.broadcast(mine, 1), values(dtype, 1)),
            (kv.broadcast(mine[0, 0], 1), values(dtype, 1)[0, 0]),
            (kv.allgather(mine), everyone),
            (kv.alltoall(everyone)[0], np.concatenate([mine] * SIZE)),
            (kv.allgather(mine.T), np.concatenate([values(dtype, r).T for r in range(SIZE)])),
        ):
            assert got.dtype == dtype
            assert (got.shape, got.tobytes()) == (wanted.shape, wanted.tobytes())
        with pytest.raises(InvalidArgumentError, match=r"reshape it to \(1,\)"):
            kv.allgather(mine[0, 0])

    on_ranks(work)


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("op", [Sum, Average])
def test_complex_numbers_are_combined(dtype, op):
    total = sum(values(dtype, r) for r in range(SIZE)) / (SIZE if op == Average else 1)

    def work(kv, rank):
        mine = values(dtype, rank)
        np.testing.assert_allclose(kv.allreduce(mine, op=op), total, rtol=1e-6)
        np.testing.assert_allclose(
            kv.allreduce(mine, op=op, prescale_factor=0.5, postscale_factor=4.0), 2 * total,
            rtol=1e-6,
        )  # fmt: skip
        parts = kv.reducescatter(np.concatenate([mine] * SIZE), op=op)
        np.testing.assert_allclose(parts, total, rtol=1e-6)
        plain, pair = kv.grouped_allreduce([np.ones(2), mine], op=op)
        assert plain.dtype == np.float64
        np.testing.assert_allclose(pair, total, rtol=1e-6)
        np.testing.assert_allclose(kv.allreduce(complex(rank, 1), op=Sum), 3 + 3j)

    on_ranks(work)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_numbers_wrap_around(dtype):
    every = [values(dtype, r) for r in range(SIZE)]

    def work(kv, rank):
        np.testing.assert_array_equal(kv.allreduce(every[rank], op=Sum), sum(every))
        product = every[0] * every[1] * every[2]
        np.testing.assert_array_equal(kv.allreduce(every[rank], op=Product), product)

    on_ranks(work)


REFUSED = {
    "complex64": (COMPLEX[0], [Min, Max, Product, Adasum], "combined by Sum or Average"),
    "uint32": (np.uint32, [Average, Min, Max, Adasum], "Sum or Product, without factors"),
    "uint64": (np.uint64, [Average, Min, Max, Adasum], "convert to int64 or float64"),
}
if BITS:
    REFUSED["float8_e5m2"] = BITS[1], [Sum, Average, Min, Max, Product], "sent, but not combined"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said(name):
    dtype, ops, text = REFUSED[name]

    def work(kv, rank):
        for op in ops:
            said = f"with op {op.name} is not for tensors of {name}: .*{text}"
            for verb in (kv.allreduce, kv.reducescatter):
                if op != Adasum or verb == kv.allreduce:
                    with pytest.raises(InvalidArgumentError, match=said):
                        verb(values(dtype, rank, (4, 2)), op=op)
        if dtype == np.uint32:
            with pytest.raises(InvalidArgumentError, match="with op Sum and factors"):
                kv.allreduce(values(dtype, rank), op=Sum, prescale_factor=2.0)

    on_ranks(work)

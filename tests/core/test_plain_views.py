"""What a grouped verb asks of all its arrays in one call: which it takes, and what comes of it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import kolovod.numpy  # noqa: F401 - has the engine read arrays
from kolovod import _native
from kolovod.core.ops import Adasum, Sum
from kolovod.errors import InvalidArgumentError
from kolovod.testing.loopback import loopback

SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 3)]


def address_of(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "float16", "int64"])
def test_arrays_are_described_as_the_engine_gets_them(dtype):
    arrays = [np.ones(shape, dtype) for shape in SHAPES]
    code = _native.DTYPES[dtype]
    entries, made = _native.plain_views("numpy", arrays, False)
    assert made == []
    assert entries == [(code, a.shape, address_of(a), address_of(a)) for a in arrays]
    entries, made = _native.plain_views("numpy", arrays, True)
    assert entries == [
        (code, a.shape, address_of(a), address_of(new)) for a, new in zip(arrays, made, strict=True)
    ]
    assert [(new.shape, new.dtype) for new in made] == [(a.shape, a.dtype) for a in arrays]
    assert all(
        address_of(new) != address_of(a) for a, new in zip(arrays, made, strict=True) if a.size
    )


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


OTHERS = {
    "with gaps": lambda: np.ones(9)[::2],
    "columns first": lambda: np.asfortranarray(np.ones((2, 3))),
    "of other bytes": lambda: np.ones(3, ">f4"),
    "masked": lambda: np.ma.masked_array(np.ones(3)),
    "number": lambda: 3.0,
    "nothing": lambda: None,
    "complex": lambda: np.ones(3, np.complex64),
}


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize("kind", OTHERS)
def test_one_that_is_not_plain_leaves_all_to_a_closer_look(kind, makes):
    assert _native.plain_views("numpy", [np.ones(3), OTHERS[kind]()], makes) is None


def test_what_must_not_be_written_may_be_read():
    assert _native.plain_views("numpy", [read_only()], False) is None
    assert _native.plain_views("numpy", [read_only()], True) is not None


@pytest.mark.parametrize("name", ["grouped_allreduce", "grouped_allreduce_"])
@pytest.mark.parametrize("later", ["", "_async"])
@pytest.mark.parametrize("op", [Sum, Adasum])
def test_results_are_the_same_by_either_way(monkeypatch, name, later, op):
    name = name[:-1] + later + "_" if name.endswith("_") else name + later

    def work(kv):
        rank = kv.world().rank
        arrays = [np.full(shape, 1.0 + rank) for shape in SHAPES]
        found = getattr(kv, name)(arrays, name="g", op=op)
        found = found.wait() if later else found
        if name.endswith("_"):
            assert all(map(lambda a, b: a is b, found, arrays))
        else:
            assert all((a == 1.0 + rank).all() for a in arrays)
        return [each.tolist() for each in found]

    with loopback(2) as world:
        quick = world.run(work)
        monkeypatch.setattr(_native, "plain_views", lambda *given: None)
        assert world.run(work) == quick
    assert quick[0] == quick[1]


def test_nothing_refers_to_the_arrays_afterwards():
    with loopback(1) as world:
        (kv,) = world.collectives
        arrays = [np.ones(3) for _ in range(3)]
        before = [sys.getrefcount(each) for each in arrays]
        for _ in range(5):
            kv.grouped_allreduce_(arrays, op=Sum)
            kv.grouped_allreduce(arrays, op=Sum)
            kv.grouped_allreduce_async_(arrays, op=Sum).wait()
        assert [sys.getrefcount(each) for each in arrays] == before


def test_the_same_errors():
    with loopback(1) as world:
        (kv,) = world.collectives
        with pytest.raises(InvalidArgumentError, match="int32"):
            kv.grouped_allreduce([np.ones(3), np.ones(3, np.complex256)])
        with pytest.raises(InvalidArgumentError, match=r"read-only|writ"):
            kv.grouped_allreduce_([np.ones(3), read_only()])
